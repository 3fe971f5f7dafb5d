#include "libs/model/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>

#include "tests/unit/model/test_models.h"

namespace moerl::model {
namespace {

std::string File(const std::string& header, const std::string& data) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + header + data;
}

std::string ErrorOf(const std::string& file) {
  const auto views = ParseSafetensors(file);
  return views.ok() ? "accepted" : std::string(views.status().message());
}

constexpr char kGood[] = R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                         R"("b":{"dtype":"BF16","shape":[],"data_offsets":[8,10]}})";

TEST(Safetensors, ReadsWhatItWrote) {
  TemporaryDirectory dir;
  const float values[6] = {1, 2, 3, 4, 5, 6};
  const std::string bytes(reinterpret_cast<const char*>(values), sizeof(values));
  const std::vector<TensorView> views = {{"x", FileDType::kF32, {2, 3}, bytes}, {"empty", FileDType::kI64, {0, 4}, ""}};
  ASSERT_TRUE(WriteSafetensors(dir.path() + "/f", views, {{"k", "v"}}).ok());
  auto file = SafetensorsFile::Open(dir.path() + "/f");
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_EQ((*file)->tensors().size(), 2u);
  EXPECT_EQ((*file)->tensors()[0].name, "x");
  EXPECT_EQ((*file)->tensors()[0].shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ((*file)->tensors()[0].bytes, bytes);
}

// Pages of files in this process's memory (proc(5), statm).
int64_t NumFilePages() {
  std::ifstream statm("/proc/self/statm");
  int64_t size = 0, resident = 0, shared = 0;
  statm >> size >> resident >> shared;
  return shared;
}

TEST(Safetensors, ForgottenTensorsLeaveMemoryAndReadTheSameAgain) {
  TemporaryDirectory dir;
  const std::string bytes(16 << 20, 'x');
  const std::vector<TensorView> views = {{"x", FileDType::kF32, {4 << 20}, bytes}};
  ASSERT_TRUE(WriteSafetensors(dir.path() + "/f", views).ok());
  auto file = SafetensorsFile::Open(dir.path() + "/f");
  ASSERT_TRUE(file.ok()) << file.status();
  const TensorView& view = (*file)->tensors()[0];
  ASSERT_TRUE(view.bytes == bytes);
  const int64_t before = NumFilePages();
  (*file)->Forget(view);
  EXPECT_LT(NumFilePages(), before - 3000);  // of 4096
  EXPECT_TRUE(view.bytes == bytes);
}

TEST(Safetensors, AcceptsMetadataAndScalars) {
  const std::string file = File(kGood, std::string(10, '\1'));
  const auto views = ParseSafetensors(file);
  ASSERT_TRUE(views.ok()) << views.status();
  EXPECT_EQ(views->size(), 2u);
}

TEST(Safetensors, NamesWhatIsWrongWithAFile) {
  const std::string data(8, 'x');
  const auto one = [&](const std::string& entry) { return ErrorOf(File("{" + entry + "}", data)); };
  const struct {
    std::string found, part;
  } cases[] = {
      {ErrorOf("abc"), "too short"},
      {ErrorOf(File(kGood, "short")), "leave the data of 5 bytes"},
      {ErrorOf(File(kGood, std::string(11, ' '))), "cover 10 bytes of 11"},
      {ErrorOf(File(kGood, std::string(10, ' ')).substr(0, 60)), "truncated"},
      {ErrorOf(std::string("\xff\xff\xff\xff\xff\xff\xff\x7f", 8) + "{}"), "longer than"},
      {ErrorOf(File("", "")), "does not start"},
      {ErrorOf(File("[]", "")), "does not start"},
      {ErrorOf(File("{\"a\":", "")), "not JSON"},
      {one(R"("a":{"dtype":"F99","shape":[2],"data_offsets":[0,8]})"), "unknown dtype"},
      {one(R"("a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]})"), "needs 12 bytes"},
      {one(R"("a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]})"), "negative"},
      {one(R"("a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]})"), "fractional"},
      {one(R"("a":{"dtype":"F32","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,8]})"), "overflows"},
      {one(R"("a":{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,2],"data_offsets":[0,8]})"), "more than 8"},
      {one(R"("a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]})"), "leave the data"},
      {one(R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8,9]})"), "more than 2"},
      {one(R"("a":{"dtype":"F32","shape":[2]})"), "two data_offsets"},
      {one(R"("a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]})"), "appears twice"},
      {one(R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})"),
       "key \"a\" appears twice"},
      {one(R"("a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]})"),
       "neither overlap"},
      {one(R"("a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]})"), "neither overlap"},
      {one(R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"extra":"x"})"), "unknown field"},
      {one(R"("a":[1])"), "unexpected an array"},
      {one(R"("a":{"dtype":{"x":"y"},"shape":[2],"data_offsets":[0,8]})"), "unexpected an object"},
  };
  for (const auto& c : cases) EXPECT_NE(c.found.find(c.part), std::string::npos) << c.found << " without " << c.part;
}

TEST(Safetensors, RefusesToWriteWhatItWouldNotRead) {
  TemporaryDirectory dir;
  EXPECT_FALSE(WriteSafetensors(dir.path() + "/f", {{"x", FileDType::kF32, {2}, "four"}}).ok());
  EXPECT_FALSE(
      WriteSafetensors(dir.path() + "/f", {{"x", FileDType::kU8, {1}, "a"}, {"x", FileDType::kU8, {1}, "b"}}).ok());
  EXPECT_FALSE(std::filesystem::exists(dir.path() + "/f"));
}

TEST(SafetensorsDirectory, ReadsShardsAndSaysWhatTheIndexAndTheFilesDisagreeOn) {
  TemporaryDirectory dir;
  const ModelConfig config = SmallMoe();
  const TensorSet set = RandomParameters(config, 1);
  ASSERT_TRUE(WriteModelDirectory(dir.path(), config, set.views(), Compute::kFp32, /*shard_bytes_max=*/10'000).ok());
  ASSERT_TRUE(std::filesystem::exists(dir.path() + "/model.safetensors.index.json"));
  {
    auto model = SafetensorsDirectory::Open(dir.path());
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_EQ((*model)->tensors().size(), set.views().size());
    for (const TensorView& view : set.views()) {
      ASSERT_NE((*model)->Find(view.name), nullptr);
      EXPECT_TRUE((*model)->Find(view.name)->bytes == view.bytes) << view.name;
    }
  }
  std::string first;
  for (const auto& entry : std::filesystem::directory_iterator(dir.path())) {
    if (entry.path().filename().string().rfind("model-00001-of-", 0) == 0) first = entry.path().string();
  }
  ASSERT_FALSE(first.empty());
  ASSERT_TRUE(WriteSafetensors(first, {{"other", FileDType::kU8, {1}, "a"}}).ok());
  EXPECT_NE(SafetensorsDirectory::Open(dir.path()).status().message().find("the index gives it"), std::string::npos);
}

TEST(SafetensorsDirectory, KeepsToItsOwnDirectory) {
  TemporaryDirectory dir;
  std::ofstream(dir.path() + "/model.safetensors.index.json") << R"({"weight_map":{"a":"../../etc/passwd"}})";
  EXPECT_NE(SafetensorsDirectory::Open(dir.path()).status().message().find("not a file name"), std::string::npos);
}

}  // namespace
}  // namespace moerl::model
