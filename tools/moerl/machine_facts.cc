#include "tools/moerl/machine_facts.h"

#include <dlfcn.h>
#include <rdma/fabric.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <set>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "libs/base/env.h"
#include "libs/base/machine.h"

namespace moerl {
namespace {

constexpr std::array<const char*, 9> kFeatures = {"avx2",        "fma",         "f16c",        "avx512f", "avx512bw",
                                                  "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16"};

std::string ReadText(const std::string& path) { return PosixEnv()->ReadFile(path).value_or(std::string()); }

// The value after "key" and a colon in a file like /proc/cpuinfo or /proc/meminfo: of the first such line.
std::string Field(absl::string_view text, absl::string_view key) {
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(line, absl::MaxSplits(':', 1));
    if (absl::StripAsciiWhitespace(parts.first) == key) return std::string(absl::StripAsciiWhitespace(parts.second));
  }
  return "";
}

uint64_t FirstNumber(absl::string_view text) {
  uint64_t number = 0;
  const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(text, absl::MaxSplits(' ', 1));
  return absl::SimpleAtoi(parts.first, &number) ? number : 0;
}

void ReadCpu(MachineFacts& facts) {
  const std::string cpuinfo = ReadText("/proc/cpuinfo");
  facts.cpu_model = Field(cpuinfo, "model name");
  const std::string flags = Field(cpuinfo, "flags");
  const std::set<absl::string_view> known = absl::StrSplit(flags, ' ');
  for (const char* feature : kFeatures) {
    if (known.contains(feature)) facts.cpu_features.push_back(feature);
  }
  facts.cores_online = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  facts.cores_allowed = AllowedCores();
}

void ReadMemory(MachineFacts& facts) {
  const std::string meminfo = ReadText("/proc/meminfo");
  facts.memory_bytes = FirstNumber(Field(meminfo, "MemTotal")) * 1024;
  facts.memory_allowed_bytes = std::min(facts.memory_bytes, AllowedMemoryBytes());
  facts.huge_pages = FirstNumber(Field(meminfo, "HugePages_Total"));
  facts.huge_page_bytes = FirstNumber(Field(meminfo, "Hugepagesize")) * 1024;
  struct statvfs shm;
  if (statvfs("/dev/shm", &shm) == 0) facts.shm_bytes = uint64_t{shm.f_frsize} * shm.f_blocks;
}

std::optional<uint64_t> HardLimit(int resource) {
  rlimit limit{};
  if (getrlimit(static_cast<__rlimit_resource>(resource), &limit) != 0 || limit.rlim_max == RLIM_INFINITY) {
    return std::nullopt;
  }
  return limit.rlim_max;
}

void ReadFabric(MachineFacts& facts) {
  const uint32_t version = fi_version();
  facts.libfabric_version = absl::StrCat(FI_MAJOR(version), ".", FI_MINOR(version));
  fi_info* list = nullptr;
  if (fi_getinfo(FI_VERSION(1, 17), nullptr, nullptr, 0, nullptr, &list) == 0) {
    std::set<std::string> seen;
    for (const fi_info* info = list; info != nullptr; info = info->next) {
      const std::string name = info->fabric_attr->prov_name;
      if (!seen.insert(name).second) continue;
      const uint32_t of_provider = info->fabric_attr->prov_version;
      facts.providers.push_back({name, absl::StrCat(FI_MAJOR(of_provider), ".", FI_MINOR(of_provider))});
    }
    fi_freeinfo(list);
  }
  constexpr char kDevices[] = "/sys/class/infiniband";
  for (const std::string& device : PosixEnv()->List(kDevices).value_or(std::vector<std::string>())) {
    std::error_code error;
    const auto driver = std::filesystem::read_symlink(JoinPath(JoinPath(kDevices, device), "device/driver"), error);
    if (!error && driver.filename() == "efa") facts.efa_devices.push_back(device);
  }
}

// A shared library that may be absent.
class OptionalLibrary {
 public:
  explicit OptionalLibrary(const char* name) : handle_(dlopen(name, RTLD_NOW | RTLD_LOCAL)) {}
  OptionalLibrary(const OptionalLibrary&) = delete;
  OptionalLibrary& operator=(const OptionalLibrary&) = delete;
  // Not unloaded: CUDA's libraries start threads.
  ~OptionalLibrary() = default;

  template <typename Function>
  Function* Find(const char* name) const {
    return handle_ == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(handle_, name));
  }

 private:
  void* handle_;
};

// Signatures of CUDA's driver API and of NCCL, written here so that nothing need be installed to build.
CudaDevice ReadCudaDevice(const OptionalLibrary& cuda, int device) {
  constexpr int kCapabilityMajor = 75, kCapabilityMinor = 76;
  CudaDevice found;
  std::array<char, 128> name{};
  auto* get_name = cuda.Find<int(char*, int, int)>("cuDeviceGetName");
  auto* get_memory = cuda.Find<int(size_t*, int)>("cuDeviceTotalMem_v2");
  auto* get_attribute = cuda.Find<int(int*, int, int)>("cuDeviceGetAttribute");
  if (get_name != nullptr && get_name(name.data(), static_cast<int>(name.size()) - 1, device) == 0)
    found.name = name.data();
  size_t bytes = 0;
  if (get_memory != nullptr && get_memory(&bytes, device) == 0) found.memory_bytes = bytes;
  int major = 0, minor = 0;
  if (get_attribute != nullptr && get_attribute(&major, kCapabilityMajor, device) == 0 &&
      get_attribute(&minor, kCapabilityMinor, device) == 0) {
    found.compute_capability = absl::StrCat(major, ".", minor);
  }
  return found;
}

void ReadCuda(MachineFacts& facts) {
  const OptionalLibrary cuda("libcuda.so.1");
  auto* init = cuda.Find<int(unsigned)>("cuInit");
  auto* get_version = cuda.Find<int(int*)>("cuDriverGetVersion");
  auto* get_count = cuda.Find<int(int*)>("cuDeviceGetCount");
  int version = 0, count = 0;
  if (get_version != nullptr && get_version(&version) == 0 && version > 0) {
    facts.cuda_driver_version = absl::StrCat(version / 1000, ".", version % 1000 / 10);
  }
  if (init != nullptr && get_count != nullptr && init(0) == 0 && get_count(&count) == 0) {
    for (int device = 0; device < count; ++device) facts.cuda_devices.push_back(ReadCudaDevice(cuda, device));
  }
  const OptionalLibrary nccl("libnccl.so.2");
  auto* nccl_version = nccl.Find<int(int*)>("ncclGetVersion");
  if (nccl_version != nullptr && nccl_version(&version) == 0) {
    facts.nccl_version = absl::StrCat(version / 10000, ".", version % 10000 / 100, ".", version % 100);
  }
}

}  // namespace

MachineFacts ReadMachineFacts() {
  MachineFacts facts;
  utsname names{};
  if (uname(&names) == 0) facts.kernel = names.release;
  ReadCpu(facts);
  ReadMemory(facts);
  ReadFabric(facts);
  ReadCuda(facts);
  facts.memlock_bytes_max = HardLimit(RLIMIT_MEMLOCK);
  facts.open_files_max = HardLimit(RLIMIT_NOFILE);
  facts.has_setpriv = access("/usr/bin/setpriv", X_OK) == 0;
  return facts;
}

}  // namespace moerl
