#ifndef MOERL_LIBS_MODEL_SAFETENSORS_H_
#define MOERL_LIBS_MODEL_SAFETENSORS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace moerl::model {

// The safetensors format: u64 little-endian header length, a JSON object {name: {dtype, shape, data_offsets}}, then the
// data. The element types are the format's own names.
enum class FileDType { kF32, kF16, kBF16, kF64, kF8E4M3, kI64, kI32, kI16, kI8, kU8, kBool };
absl::StatusOr<FileDType> ParseFileDType(absl::string_view name);  // "BF16"
absl::string_view FileDTypeName(FileDType dtype);
int64_t FileDTypeBytes(FileDType dtype);

// Bounds of what a reader accepts.
inline constexpr uint64_t kSafetensorsHeaderBytesMax = 100'000'000;  // the format's own limit
inline constexpr int kSafetensorsRankMax = 8;
inline constexpr int kSafetensorsShardsMax = 10'000;

// One named tensor, its bytes owned by someone else (a memory map, a receive buffer).
struct TensorView {
  std::string name;
  FileDType dtype = FileDType::kF32;
  std::vector<int64_t> shape;  // row-major; empty: a scalar
  absl::string_view bytes;     // shape's product times the element size
};

// Reads the header of `file`, which is the whole file's bytes; the views point into it.
// Everything is checked before anything is believed: header length within the file and the limit, JSON, types, shapes
// without overflow, bytes = product(shape) × element size, no duplicate name, ranges that tile the data exactly.
// INVALID_ARGUMENT names the tensor, what was expected and what was found. Pure; never reads outside `file`.
absl::StatusOr<std::vector<TensorView>> ParseSafetensors(absl::string_view file);

// One memory-mapped file. Immutable, thread-safe; views live as long as this object.
class SafetensorsFile {
 public:
  // Errors as ParseSafetensors, prefixed by the path; NOT_FOUND when there is no such file.
  static absl::StatusOr<std::unique_ptr<SafetensorsFile>> Open(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  // In the order of the data.
  const std::vector<TensorView>& tensors() const { return tensors_; }

  // Takes the pages of one of these views out of this process's memory, for who has copied them; read again they come
  // from the file. Without it, a file that is read once stands in memory beside its copy.
  void Forget(const TensorView& view) const;

 private:
  SafetensorsFile() = default;
  void* map_ = nullptr;
  size_t bytes_ = 0;
  std::vector<TensorView> tensors_;
};

// The tensors of a model directory: `model.safetensors`, or the shards that `model.safetensors.index.json` names (each
// file's tensors must be exactly those the index gives it). Immutable, thread-safe; views live as long as this object.
class SafetensorsDirectory {
 public:
  // NOT_FOUND when neither file exists; INVALID_ARGUMENT names the file and the fault.
  static absl::StatusOr<std::unique_ptr<SafetensorsDirectory>> Open(const std::string& directory);

  const std::vector<TensorView>& tensors() const { return tensors_; }
  // Null when there is none of that name.
  const TensorView* Find(absl::string_view name) const;

 private:
  SafetensorsDirectory() = default;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::vector<TensorView> tensors_;
  absl::flat_hash_map<std::string, size_t> index_;
};

// Writes one file, tensors in the order given, metadata {"format": "pt"} plus `metadata`; synced before it is renamed
// into place, so that the path holds the old file or the whole new one. INVALID_ARGUMENT on a duplicate name or a size
// that does not match the shape; other errors are the system's, with the path.
absl::Status WriteSafetensors(const std::string& path, const std::vector<TensorView>& tensors,
                              const std::vector<std::pair<std::string, std::string>>& metadata = {});

}  // namespace moerl::model

#endif  // MOERL_LIBS_MODEL_SAFETENSORS_H_
