// The safetensors reader must answer any bytes with tensors that lie inside them and tile the data, or with an error.
#include <cstdint>

#include "libs/base/check.h"
#include "libs/model/safetensors.h"
#include "libs/model/weights.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view file(reinterpret_cast<const char*>(data), size);
  const auto views = moerl::model::ParseSafetensors(file);
  if (!views.ok()) return 0;
  size_t covered = 0;
  for (const moerl::model::TensorView& view : *views) {
    MOERL_CHECK(view.bytes.data() >= file.data() && view.bytes.data() + view.bytes.size() <= file.data() + size);
    covered += view.bytes.size();
    std::vector<float> values(view.bytes.size() / moerl::model::FileDTypeBytes(view.dtype) + 1);
    (void)moerl::model::DecodeToFloat(view, values.data());
  }
  MOERL_CHECK(covered <= size);
  return 0;
}
