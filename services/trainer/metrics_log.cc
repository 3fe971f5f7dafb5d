#include "services/trainer/metrics_log.h"

#include <google/protobuf/util/json_util.h>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "libs/base/status_macros.h"

namespace moerl::trainer {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

nlohmann::json ScalarOf(const Message& message, const FieldDescriptor* field) {
  const Reflection* reflection = message.GetReflection();
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_UINT64:
      return reflection->GetUInt64(message, field);
    case FieldDescriptor::CPPTYPE_UINT32:
      return reflection->GetUInt32(message, field);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return reflection->GetDouble(message, field);
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection->GetBool(message, field);
    default:
      return nullptr;
  }
}

nlohmann::json ListOf(const Message& message, const FieldDescriptor* field) {
  nlohmann::json list = nlohmann::json::array();
  const Reflection* reflection = message.GetReflection();
  for (int i = 0; i < reflection->FieldSize(message, field); ++i) {
    list.push_back(reflection->GetRepeatedUInt64(message, field, i));
  }
  return list;
}

absl::StatusOr<v1::StepMetrics> ParseRow(absl::string_view line) {
  v1::StepMetrics row;
  google::protobuf::util::JsonParseOptions options;
  options.ignore_unknown_fields = true;
  const auto status = google::protobuf::util::JsonStringToMessage({line.data(), line.size()}, &row, options);
  if (!status.ok()) return absl::DataLossError("not a row");
  return row;
}

}  // namespace

std::string ToJsonLine(const Message& message) {
  nlohmann::ordered_json json;
  for (int i = 0; i < message.GetDescriptor()->field_count(); ++i) {
    const FieldDescriptor* field = message.GetDescriptor()->field(i);
    if (field->has_presence() && !message.GetReflection()->HasField(message, field)) continue;
    json[std::string(field->name())] = field->is_repeated() ? ListOf(message, field) : ScalarOf(message, field);
  }
  return json.dump() + "\n";
}

absl::StatusOr<std::unique_ptr<MetricsLog>> MetricsLog::Open(const std::string& path, int64_t last_step) {
  Env& env = *PosixEnv();
  auto log = std::unique_ptr<MetricsLog>(new MetricsLog());
  std::string kept;
  if (env.Exists(path)) {
    MOERL_ASSIGN_OR_RETURN(const std::string content, env.ReadFile(path));
    for (absl::string_view line : absl::StrSplit(content, '\n', absl::SkipEmpty())) {
      const absl::StatusOr<v1::StepMetrics> row = ParseRow(line);  // the last line may be half written
      if (!row.ok() || static_cast<int64_t>(row->step()) > last_step) continue;
      absl::StrAppend(&kept, line, "\n");
      log->rows_.push_back(*row);
    }
  }
  MOERL_RETURN_IF_ERROR(env.WriteFileDurably(path, kept));
  MOERL_ASSIGN_OR_RETURN(log->file_, env.OpenForWrite(path, WriteMode::kAppend));
  return log;
}

absl::Status MetricsLog::Append(const v1::StepMetrics& row) {
  rows_.push_back(row);
  return file_->Append(ToJsonLine(row));
}

}  // namespace moerl::trainer
