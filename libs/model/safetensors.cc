#include "libs/model/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "libs/base/status_macros.h"

namespace moerl::model {
namespace {

struct TypeInfo {
  FileDType dtype;
  absl::string_view name;
  int64_t bytes;
};
constexpr TypeInfo kTypes[] = {
    {FileDType::kF32, "F32", 4}, {FileDType::kF16, "F16", 2},        {FileDType::kBF16, "BF16", 2},
    {FileDType::kF64, "F64", 8}, {FileDType::kF8E4M3, "F8_E4M3", 1}, {FileDType::kI64, "I64", 8},
    {FileDType::kI32, "I32", 4}, {FileDType::kI16, "I16", 2},        {FileDType::kI8, "I8", 1},
    {FileDType::kU8, "U8", 1},   {FileDType::kBool, "BOOL", 1},
};

constexpr size_t kLengthBytes = sizeof(uint64_t);
static_assert(std::endian::native == std::endian::little, "the format is little-endian and is read in place");

absl::Status Malformed(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("safetensors: ", what));
}

// One header entry before its ranges are believed.
struct Entry {
  std::string name;
  std::string dtype;
  std::vector<uint64_t> shape, offsets;
  bool has_dtype = false, has_shape = false, has_offsets = false;
};

// Reads the header as a stream of events, so that a duplicate key is seen rather than overwritten and nothing but the
// expected structure is ever stored: {name: {"dtype": string, "shape": [n...], "data_offsets": [n, n]}, "__metadata__":
// {string: string}}.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  std::vector<Entry>& entries() { return entries_; }
  const std::string& error() const { return error_; }
  bool complete() const { return depth_ == 0 && started_; }

  bool null() override { return Unexpected("null"); }
  bool boolean(bool) override { return Unexpected("a boolean"); }
  bool number_integer(number_integer_t) override { return Unexpected("a negative number"); }
  bool number_float(number_float_t, const string_t&) override { return Unexpected("a fractional number"); }
  bool binary(binary_t&) override { return Unexpected("binary"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (!in_array_) return Unexpected("a number");
    std::vector<uint64_t>& list = key_ == "shape" ? entries_.back().shape : entries_.back().offsets;
    const size_t bound = key_ == "shape" ? kSafetensorsRankMax : 2;
    if (list.size() == bound) return Fail(absl::StrCat(Where(), ": more than ", bound, " numbers"));
    list.push_back(value);
    return true;
  }

  bool string(string_t& value) override {
    if (depth_ == 2 && in_metadata_) return true;
    if (depth_ != 2 || in_array_ || key_ != "dtype") return Unexpected("a string");
    entries_.back().dtype = value;
    return true;
  }

  bool start_object(std::size_t) override {
    if (depth_ >= 2 || in_array_) return Unexpected("an object");
    started_ = true;
    ++depth_;
    return true;
  }

  bool key(string_t& value) override {
    key_ = value;
    if (depth_ == 1) return TopKey(value);
    if (in_metadata_) return true;
    Entry& entry = entries_.back();
    bool* seen = value == "dtype"          ? &entry.has_dtype
                 : value == "shape"        ? &entry.has_shape
                 : value == "data_offsets" ? &entry.has_offsets
                                           : nullptr;
    if (seen == nullptr) return Fail(absl::StrCat("tensor \"", entry.name, "\": unknown field \"", value, "\""));
    if (*seen) return Fail(absl::StrCat("tensor \"", entry.name, "\": field \"", value, "\" appears twice"));
    *seen = true;
    return true;
  }

  bool end_object() override {
    --depth_;
    if (depth_ == 1) in_metadata_ = false;
    return true;
  }

  bool start_array(std::size_t) override {
    if (depth_ != 2 || in_metadata_ || in_array_ || (key_ != "shape" && key_ != "data_offsets")) {
      return Unexpected("an array");
    }
    in_array_ = true;
    return true;
  }

  bool end_array() override {
    in_array_ = false;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    return Fail(absl::StrCat("header is not JSON at byte ", position));
  }

 private:
  bool TopKey(const std::string& name) {
    if (!names_.insert(name).second) return Fail(absl::StrCat("key \"", name, "\" appears twice"));
    in_metadata_ = name == "__metadata__";
    if (!in_metadata_) {
      entries_.emplace_back();
      entries_.back().name = name;
    }
    return true;
  }
  std::string Where() const {
    return entries_.empty() || depth_ < 2 ? absl::StrCat("key \"", key_, "\"")
                                          : absl::StrCat("tensor \"", entries_.back().name, "\" ", key_);
  }
  bool Unexpected(absl::string_view what) { return Fail(absl::StrCat(Where(), ": unexpected ", what)); }
  bool Fail(std::string error) {
    if (error_.empty()) error_ = std::move(error);
    return false;
  }

  std::vector<Entry> entries_;
  absl::flat_hash_set<std::string> names_;
  std::string error_, key_;
  int depth_ = 0;
  bool in_array_ = false, in_metadata_ = false, started_ = false;
};

// Checks one entry against the data's size and makes its view.
absl::StatusOr<TensorView> CheckEntry(const Entry& entry, absl::string_view data) {
  const auto bad = [&](absl::string_view what) {
    return Malformed(absl::StrCat("tensor \"", entry.name, "\": ", what));
  };
  if (!entry.has_dtype || !entry.has_shape || !entry.has_offsets || entry.offsets.size() != 2) {
    return bad("expected dtype, shape and two data_offsets");
  }
  TensorView view;
  view.name = entry.name;
  auto dtype = ParseFileDType(entry.dtype);
  if (!dtype.ok()) return bad(dtype.status().message());
  view.dtype = *dtype;
  uint64_t bytes = FileDTypeBytes(view.dtype);
  for (const uint64_t dim : entry.shape) {
    if (dim > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return bad("a dimension overflows");
    if (__builtin_mul_overflow(bytes, dim, &bytes)) return bad("shape overflows 64 bits");
    view.shape.push_back(static_cast<int64_t>(dim));
  }
  const uint64_t begin = entry.offsets[0], end = entry.offsets[1];
  if (begin > end || end > data.size()) {
    return bad(absl::StrCat("data_offsets [", begin, ", ", end, ") leave the data of ", data.size(), " bytes"));
  }
  if (end - begin != bytes) {
    return bad(absl::StrCat("shape [", absl::StrJoin(entry.shape, ","), "] of ", entry.dtype, " needs ", bytes,
                            " bytes, data_offsets give ", end - begin));
  }
  view.bytes = data.substr(begin, bytes);
  return view;
}

// In order of the data, ranges must follow one another without gap or overlap and end where the data ends.
absl::Status CheckTiling(std::vector<TensorView>& views, absl::string_view data) {
  std::stable_sort(views.begin(), views.end(), [](const TensorView& a, const TensorView& b) {
    return std::make_pair(a.bytes.data(), a.bytes.size()) < std::make_pair(b.bytes.data(), b.bytes.size());
  });
  const char* expected = data.data();
  for (const TensorView& view : views) {
    if (view.bytes.data() != expected) {
      return Malformed(absl::StrCat("tensor \"", view.name, "\" starts at byte ", view.bytes.data() - data.data(),
                                    " of the data, expected ", expected - data.data(),
                                    " (ranges must neither overlap nor leave gaps)"));
    }
    expected += view.bytes.size();
  }
  if (expected != data.data() + data.size()) {
    return Malformed(
        absl::StrCat("tensors cover ", expected - data.data(), " bytes of ", data.size(), " bytes of data"));
  }
  return absl::OkStatus();
}

absl::Status SystemError(const std::string& path, absl::string_view operation) {
  const int error = errno;
  return absl::ErrnoToStatus(error, absl::StrCat(path, ": ", operation));
}

absl::StatusOr<std::string> ReadSmallFile(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return SystemError(path, "open");
  std::string text;
  char buffer[1 << 16];
  ssize_t n;
  while ((n = read(fd, buffer, sizeof(buffer))) > 0 && text.size() <= kSafetensorsHeaderBytesMax)
    text.append(buffer, n);
  close(fd);
  if (n < 0) return SystemError(path, "read");
  if (text.size() > kSafetensorsHeaderBytesMax)
    return absl::InvalidArgumentError(absl::StrCat(path, ": larger than 100 MB"));
  return text;
}

// The index's weight_map by file: which tensors each shard must hold.
absl::StatusOr<std::map<std::string, std::set<std::string>>> ParseIndex(const std::string& path) {
  MOERL_ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(path));
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": expected an object with \"weight_map\""));
  }
  std::map<std::string, std::set<std::string>> shards;
  for (const auto& [name, file] : json["weight_map"].items()) {
    if (!file.is_string())
      return absl::InvalidArgumentError(absl::StrCat(path, ": file of \"", name, "\" is no string"));
    const std::string shard = file.get<std::string>();
    if (shard.empty() || shard.find('/') != std::string::npos || shard == "." || shard == "..") {
      return absl::InvalidArgumentError(absl::StrCat(path, ": \"", shard, "\" is not a file name in this directory"));
    }
    shards[shard].insert(name);
    if (shards.size() > kSafetensorsShardsMax) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": more than ", kSafetensorsShardsMax, " shards"));
    }
  }
  return shards;
}

}  // namespace

absl::StatusOr<FileDType> ParseFileDType(absl::string_view name) {
  for (const TypeInfo& type : kTypes) {
    if (type.name == name) return type.dtype;
  }
  return absl::InvalidArgumentError(absl::StrCat("unknown dtype \"", name.substr(0, 32), "\""));
}

absl::string_view FileDTypeName(FileDType dtype) { return kTypes[static_cast<int>(dtype)].name; }
int64_t FileDTypeBytes(FileDType dtype) { return kTypes[static_cast<int>(dtype)].bytes; }

absl::StatusOr<std::vector<TensorView>> ParseSafetensors(absl::string_view file) {
  if (file.size() < kLengthBytes) return Malformed(absl::StrCat("file of ", file.size(), " bytes is too short"));
  uint64_t header_bytes;
  std::memcpy(&header_bytes, file.data(), kLengthBytes);
  if (header_bytes > kSafetensorsHeaderBytesMax) {
    return Malformed(absl::StrCat("header of ", header_bytes, " bytes is longer than ", kSafetensorsHeaderBytesMax));
  }
  if (header_bytes > file.size() - kLengthBytes) {
    return Malformed(
        absl::StrCat("header of ", header_bytes, " bytes ends after the file's ", file.size(), " (truncated?)"));
  }
  const absl::string_view header = file.substr(kLengthBytes, header_bytes);
  const absl::string_view data = file.substr(kLengthBytes + header_bytes);
  if (header.empty() || header[0] != '{') return Malformed("header does not start with '{'");
  HeaderReader reader;
  if (!nlohmann::json::sax_parse(header.begin(), header.end(), &reader) || !reader.complete()) {
    return Malformed(reader.error().empty() ? "header is not JSON" : reader.error());
  }
  std::vector<TensorView> views;
  views.reserve(reader.entries().size());
  for (const Entry& entry : reader.entries()) {
    MOERL_ASSIGN_OR_RETURN(TensorView view, CheckEntry(entry, data));
    views.push_back(std::move(view));
  }
  MOERL_RETURN_IF_ERROR(CheckTiling(views, data));
  return views;
}

absl::StatusOr<std::unique_ptr<SafetensorsFile>> SafetensorsFile::Open(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return SystemError(path, "open");
  struct stat info;
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    close(fd);
    return absl::InvalidArgumentError(absl::StrCat(path, ": not a regular file"));
  }
  std::unique_ptr<SafetensorsFile> file(new SafetensorsFile);
  file->bytes_ = static_cast<size_t>(info.st_size);
  if (file->bytes_ > 0) {
    void* map = mmap(nullptr, file->bytes_, PROT_READ, MAP_PRIVATE, fd, 0);
    if (map == MAP_FAILED) {
      absl::Status status = SystemError(path, "mmap");
      close(fd);
      return status;
    }
    file->map_ = map;
  }
  close(fd);
  auto views = ParseSafetensors(absl::string_view(static_cast<const char*>(file->map_), file->bytes_));
  if (!views.ok()) return absl::Status(views.status().code(), absl::StrCat(path, ": ", views.status().message()));
  file->tensors_ = *std::move(views);
  return file;
}

SafetensorsFile::~SafetensorsFile() {
  if (map_ != nullptr) munmap(map_, bytes_);
}

void SafetensorsFile::Forget(const TensorView& view) const {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  // Whole pages: the edges belong to neighbours too.
  const size_t into_page = reinterpret_cast<uintptr_t>(view.bytes.data()) % page;
  const size_t skipped = into_page == 0 ? 0 : page - into_page;
  if (view.bytes.size() <= skipped) return;
  const size_t bytes = (view.bytes.size() - skipped) / page * page;
  if (bytes > 0) madvise(const_cast<char*>(view.bytes.data()) + skipped, bytes, MADV_DONTNEED);
}

absl::StatusOr<std::unique_ptr<SafetensorsDirectory>> SafetensorsDirectory::Open(const std::string& directory) {
  std::unique_ptr<SafetensorsDirectory> out(new SafetensorsDirectory);
  const std::string single = directory + "/model.safetensors", index = directory + "/model.safetensors.index.json";
  std::map<std::string, std::set<std::string>> shards;
  if (access(index.c_str(), F_OK) == 0) {
    MOERL_ASSIGN_OR_RETURN(shards, ParseIndex(index));
  } else if (access(single.c_str(), F_OK) == 0) {
    shards["model.safetensors"];
  } else {
    return absl::NotFoundError(
        absl::StrCat(directory, ": neither model.safetensors nor model.safetensors.index.json is there"));
  }
  for (const auto& [shard, names] : shards) {
    MOERL_ASSIGN_OR_RETURN(std::unique_ptr<SafetensorsFile> file,
                           SafetensorsFile::Open(absl::StrCat(directory, "/", shard)));
    if (!names.empty() && names.size() != file->tensors().size()) {
      return absl::InvalidArgumentError(absl::StrCat(directory, "/", shard, ": holds ", file->tensors().size(),
                                                     " tensors, the index gives it ", names.size()));
    }
    for (const TensorView& view : file->tensors()) {
      if (!names.empty() && names.count(view.name) == 0) {
        return absl::InvalidArgumentError(
            absl::StrCat(directory, "/", shard, ": tensor \"", view.name, "\" is not the index's for this file"));
      }
      out->index_.emplace(view.name, out->tensors_.size());
      out->tensors_.push_back(view);
    }
    out->files_.push_back(std::move(file));
  }
  return out;
}

const TensorView* SafetensorsDirectory::Find(absl::string_view name) const {
  const auto it = index_.find(name);
  return it == index_.end() ? nullptr : &tensors_[it->second];
}

namespace {

absl::StatusOr<std::string> FormatHeader(const std::vector<TensorView>& tensors,
                                         const std::vector<std::pair<std::string, std::string>>& metadata) {
  nlohmann::ordered_json header;
  header["__metadata__"]["format"] = "pt";
  for (const auto& [key, value] : metadata) header["__metadata__"][key] = value;
  absl::flat_hash_set<absl::string_view> names;
  uint64_t offset = 0;
  for (const TensorView& tensor : tensors) {
    int64_t bytes = FileDTypeBytes(tensor.dtype);
    for (const int64_t dim : tensor.shape) bytes *= dim;
    if (bytes != static_cast<int64_t>(tensor.bytes.size())) {
      return Malformed(
          absl::StrCat("tensor \"", tensor.name, "\": shape needs ", bytes, " bytes, given ", tensor.bytes.size()));
    }
    if (!names.insert(tensor.name).second)
      return Malformed(absl::StrCat("tensor \"", tensor.name, "\" is given twice"));
  }
  // ordered_json looks keys up linearly, so entries are written as text.
  std::string text = header.dump();
  text.pop_back();
  for (const TensorView& tensor : tensors) {
    nlohmann::ordered_json entry;
    entry["dtype"] = std::string(FileDTypeName(tensor.dtype));
    entry["shape"] = tensor.shape;
    entry["data_offsets"] = {offset, offset + tensor.bytes.size()};
    offset += tensor.bytes.size();
    absl::StrAppend(&text, ",", nlohmann::json(tensor.name).dump(), ":", entry.dump());
  }
  text += '}';
  text.resize((text.size() + 7) / 8 * 8, ' ');  // data starts aligned to 8
  return text;
}

absl::Status WriteAll(int fd, const std::string& path, absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return SystemError(path, "write");
    bytes.remove_prefix(n);
  }
  return absl::OkStatus();
}

absl::Status WriteSynced(int fd, const std::string& path, absl::string_view header,
                         const std::vector<TensorView>& tensors) {
  const uint64_t length = header.size();
  MOERL_RETURN_IF_ERROR(WriteAll(fd, path, {reinterpret_cast<const char*>(&length), kLengthBytes}));
  MOERL_RETURN_IF_ERROR(WriteAll(fd, path, header));
  for (const TensorView& tensor : tensors) MOERL_RETURN_IF_ERROR(WriteAll(fd, path, tensor.bytes));
  if (fsync(fd) != 0) return SystemError(path, "fsync");
  return absl::OkStatus();
}

}  // namespace

absl::Status WriteSafetensors(const std::string& path, const std::vector<TensorView>& tensors,
                              const std::vector<std::pair<std::string, std::string>>& metadata) {
  MOERL_ASSIGN_OR_RETURN(const std::string header, FormatHeader(tensors, metadata));
  const std::string temporary = path + ".tmp";
  const int fd = open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return SystemError(temporary, "open");
  absl::Status status = WriteSynced(fd, temporary, header, tensors);
  if (close(fd) != 0 && status.ok()) status = SystemError(temporary, "close");
  if (status.ok() && rename(temporary.c_str(), path.c_str()) != 0) status = SystemError(path, "rename");
  if (!status.ok()) unlink(temporary.c_str());
  return status;
}

}  // namespace moerl::model
