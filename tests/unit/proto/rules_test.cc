// The (rules) options of the schema are consistent with themselves.
#include <gtest/gtest.h>

#include "libs/base/field_rules.h"
#include "moerl/v1/field_rules.pb.h"
#include "tests/unit/proto/descriptor_set.h"

namespace moerl {
namespace {

using google::protobuf::FieldDescriptor;

const v1::FieldRules& RulesOf(const FieldDescriptor& field) { return field.options().GetExtension(v1::rules); }

TEST(FieldRulesOfTheSchema, AreThere) {
  int num_ruled = 0;
  ForEachField([&](const FieldDescriptor& field) { num_ruled += field.options().HasExtension(v1::rules) ? 1 : 0; });
  EXPECT_GT(num_ruled, 100);
}

TEST(FieldRulesOfTheSchema, BoundsAreOrderedAndNotNegativeForLengths) {
  ForEachField([](const FieldDescriptor& field) {
    const v1::FieldRules& rules = RulesOf(field);
    if (rules.has_min() && rules.has_max()) {
      EXPECT_LE(rules.min(), rules.max()) << field.full_name();
    }
    const bool is_length = field.is_repeated() || field.cpp_type() == FieldDescriptor::CPPTYPE_STRING;
    if (is_length && rules.has_min()) {
      EXPECT_GE(rules.min(), 0) << field.full_name();
    }
    if (rules.min_exclusive()) {
      EXPECT_TRUE(rules.has_min()) << field.full_name();
    }
    if (rules.allowed_size() > 0) {
      EXPECT_EQ(field.type(), FieldDescriptor::TYPE_STRING) << field.full_name();
    }
  });
}

TEST(FieldRulesOfTheSchema, ARequiredFieldHasNoDefault) {
  ForEachField([](const FieldDescriptor& field) {
    if (IsRequired(field)) {
      EXPECT_TRUE(DefaultOf(field).empty()) << field.full_name();
    }
  });
}

// Zero without presence stands for the default; where zero is a legal value of its own and the default is another,
// the field must tell the two apart.
TEST(FieldRulesOfTheSchema, AFieldOnTheWireWhoseZeroDiffersFromItsDefaultHasPresence) {
  ForEachField([](const FieldDescriptor& field) {
    if (field.file()->name() == "moerl/v1/config.proto") return;  // read from YAML, which tells them apart
    const std::string text = DefaultOf(field);
    if (text.empty() || text == "0" || text == "false") return;
    const bool is_zero_legal = !RulesOf(field).has_min() || RulesOf(field).min() <= 0;
    if (is_zero_legal) {
      EXPECT_TRUE(field.has_presence()) << field.full_name();
    }
  });
}

}  // namespace
}  // namespace moerl
