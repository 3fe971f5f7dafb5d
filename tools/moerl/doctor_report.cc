// What the facts of a machine mean, and how they are printed.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "tools/moerl/machine_facts.h"

namespace moerl {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;
// server.connections_max by default, and the files a program has besides.
constexpr uint64_t kOpenFilesWanted = 16384 + 1024;
// Rings of 16 ranks of one node with the default slots (64 KiB × 8 a peer, two hops), twice: old and new epoch.
constexpr uint64_t kShmBytesWanted = 512 * kMiB;
// What EFA's provider takes from huge pages by itself.
constexpr uint64_t kEfaHugeBytesWanted = 110 * kMiB;
constexpr uint64_t kMemoryBytesWanted = 4096 * kMiB;

std::string Bytes(uint64_t bytes) {
  if (bytes >= 1024 * kMiB) return absl::StrFormat("%.1f GiB", static_cast<double>(bytes) / (1024.0 * kMiB));
  return absl::StrFormat("%.0f MiB", static_cast<double>(bytes) / kMiB);
}

template <typename Show>
std::string OrUnlimited(const std::optional<uint64_t>& value, Show show) {
  return value.has_value() ? show(*value) : std::string("unlimited");
}

bool HasProvider(const MachineFacts& facts, absl::string_view name) {
  return std::any_of(facts.providers.begin(), facts.providers.end(),
                     [&](const FabricProvider& provider) { return provider.name == name; });
}

bool HasFeature(const MachineFacts& facts, absl::string_view name) {
  return std::find(facts.cpu_features.begin(), facts.cpu_features.end(), name) != facts.cpu_features.end();
}

bool IsKernelAtLeast(const std::string& kernel, int major, int minor) {
  const std::vector<std::string> parts = absl::StrSplit(kernel, absl::ByAnyChar(".-"));
  int found_major = 0, found_minor = 0;
  if (parts.size() < 2 || !absl::SimpleAtoi(parts[0], &found_major) || !absl::SimpleAtoi(parts[1], &found_minor))
    return true;
  return std::pair(found_major, found_minor) >= std::pair(major, minor);
}

void JudgeMachine(const MachineFacts& facts, std::vector<Shortfall>& out) {
  if (!HasFeature(facts, "avx2") || !HasFeature(facts, "fma")) {
    out.push_back({"CPU features", facts.cpu_features.empty() ? "none of use" : absl::StrJoin(facts.cpu_features, " "),
                   "avx2 and fma", "it works with the portable kernels, slowly; take a machine of 2015 or later"});
  }
  if (facts.cores_allowed < 2) {
    out.push_back({"cores", absl::StrCat(facts.cores_allowed), "2 or more",
                   "it works, slowly; raise the cgroup's CPU quota or the affinity mask"});
  }
  if (facts.memory_allowed_bytes < kMemoryBytesWanted) {
    out.push_back({"memory", Bytes(facts.memory_allowed_bytes), Bytes(kMemoryBytesWanted) + " or more",
                   "raise the cgroup's memory limit, or make rollout.kv_cache_bytes smaller"});
  }
  if (!IsKernelAtLeast(facts.kernel, 5, 4)) {
    out.push_back({"kernel", facts.kernel, "5.4 or later", "moerl run waits for processes through pidfd; upgrade"});
  }
  if (!facts.has_setpriv) {
    out.push_back({"setpriv", "not found", "/usr/bin/setpriv", "moerl run needs it; install the package util-linux"});
  }
}

void JudgeLimits(const MachineFacts& facts, std::vector<Shortfall>& out) {
  if (facts.open_files_max.value_or(kOpenFilesWanted) < kOpenFilesWanted) {
    out.push_back({"open files", absl::StrCat(*facts.open_files_max), absl::StrCat(kOpenFilesWanted, " or more"),
                   "raise the hard limit (ulimit -Hn, LimitNOFILE= of the service), or lower server.connections_max"});
  }
  if (facts.shm_bytes < kShmBytesWanted) {
    out.push_back(
        {"/dev/shm", Bytes(facts.shm_bytes), Bytes(kShmBytesWanted) + " or more",
         "mount -o remount,size=2G /dev/shm; docker run --shm-size=2g; in a pod an emptyDir with medium: Memory"});
  }
}

void JudgeFabric(const MachineFacts& facts, std::vector<Shortfall>& out) {
  if (!HasProvider(facts, "net") && !HasProvider(facts, "tcp") && !HasProvider(facts, "shm") &&
      !HasProvider(facts, "efa")) {
    out.push_back({"libfabric providers", "none of efa, net, tcp, shm", "one of them",
                   "expert parallelism over several ranks needs one; install libfabric with its tcp provider"});
  }
  if (facts.efa_devices.empty()) return;
  if (!HasProvider(facts, "efa")) {
    out.push_back(
        {"provider efa", "not offered", "offered, since there are EFA devices",
         "use the libfabric of AWS's EFA installer (/opt/amazon/efa), and let the container see /dev/infiniband"});
  }
  if (facts.memlock_bytes_max.has_value()) {
    out.push_back({"locked memory", Bytes(*facts.memlock_bytes_max), "unlimited",
                   "EFA registers memory: ulimit -l unlimited, LimitMEMLOCK=infinity for containerd"});
  }
  if (facts.huge_pages * facts.huge_page_bytes < kEfaHugeBytesWanted) {
    out.push_back({"huge pages", Bytes(facts.huge_pages * facts.huge_page_bytes),
                   Bytes(kEfaHugeBytesWanted) + " or more",
                   "sysctl vm.nr_hugepages=512 on the node; hugepages-2Mi in the pod's limits"});
  }
}

void JudgeCuda(const MachineFacts& facts, std::vector<Shortfall>& out) {
  if (facts.cuda_devices.size() > 1 && facts.nccl_version.empty()) {
    out.push_back(
        {"NCCL", "not found", "libnccl.so.2, since there are several GPUs", "install NCCL for this CUDA version"});
  }
}

std::string Providers(const MachineFacts& facts) {
  return absl::StrJoin(facts.providers, ", ", [](std::string* out, const FabricProvider& provider) {
    absl::StrAppend(out, provider.name, " ", provider.version);
  });
}

std::string Gpus(const MachineFacts& facts) {
  if (facts.cuda_driver_version.empty()) return "no driver";
  if (facts.cuda_devices.empty()) return "no device";
  return absl::StrJoin(facts.cuda_devices, ", ", [](std::string* out, const CudaDevice& device) {
    absl::StrAppend(out, device.name, " (", Bytes(device.memory_bytes), ", capability ", device.compute_capability,
                    ")");
  });
}

std::string OrNone(const std::string& text, absl::string_view none) { return text.empty() ? std::string(none) : text; }

}  // namespace

std::vector<Shortfall> FindShortfalls(const MachineFacts& facts) {
  std::vector<Shortfall> shortfalls;
  JudgeMachine(facts, shortfalls);
  JudgeLimits(facts, shortfalls);
  JudgeFabric(facts, shortfalls);
  JudgeCuda(facts, shortfalls);
  return shortfalls;
}

std::string FactsTable(const MachineFacts& facts, const std::vector<Shortfall>& shortfalls) {
  std::string out;
  const auto row = [&](absl::string_view name, absl::string_view value) {
    absl::StrAppendFormat(&out, "%-16s %s\n", name, value);
  };
  row("kernel", facts.kernel);
  row("CPU", facts.cpu_model);
  row("CPU features", absl::StrJoin(facts.cpu_features, " "));
  row("cores", absl::StrCat(facts.cores_allowed, " of ", facts.cores_online));
  row("memory", absl::StrCat(Bytes(facts.memory_allowed_bytes), " of ", Bytes(facts.memory_bytes)));
  row("libfabric", facts.libfabric_version);
  row("providers", OrNone(Providers(facts), "none"));
  row("EFA devices", OrNone(absl::StrJoin(facts.efa_devices, ", "), "none"));
  row("CUDA driver", OrNone(facts.cuda_driver_version, "none"));
  row("GPUs", Gpus(facts));
  row("NCCL", OrNone(facts.nccl_version, "none"));
  row("locked memory", OrUnlimited(facts.memlock_bytes_max, Bytes));
  row("open files", OrUnlimited(facts.open_files_max, [](uint64_t value) { return absl::StrCat(value); }));
  row("huge pages", absl::StrCat(facts.huge_pages, " of ", Bytes(facts.huge_page_bytes)));
  row("/dev/shm", Bytes(facts.shm_bytes));
  out += "\n";
  if (shortfalls.empty()) out += "Nothing is missing.\n";
  for (const Shortfall& shortfall : shortfalls) {
    absl::StrAppend(&out, shortfall.what, ": found ", shortfall.found, ", wanted ", shortfall.wanted, "\n  ",
                    shortfall.remedy, "\n");
  }
  return out;
}

std::string FactsJson(const MachineFacts& facts, const std::vector<Shortfall>& shortfalls) {
  using Json = nlohmann::ordered_json;
  const auto limit = [](const std::optional<uint64_t>& value) {
    return value.has_value() ? Json(*value) : Json(nullptr);
  };
  Json providers = Json::array();
  for (const FabricProvider& provider : facts.providers) {
    providers.push_back({{"name", provider.name}, {"version", provider.version}});
  }
  Json devices = Json::array();
  for (const CudaDevice& device : facts.cuda_devices) {
    devices.push_back({{"name", device.name},
                       {"memory_bytes", device.memory_bytes},
                       {"compute_capability", device.compute_capability}});
  }
  Json missing = Json::array();
  for (const Shortfall& shortfall : shortfalls) {
    missing.push_back({{"what", shortfall.what},
                       {"found", shortfall.found},
                       {"wanted", shortfall.wanted},
                       {"remedy", shortfall.remedy}});
  }
  Json json;
  json["kernel"] = facts.kernel;
  json["cpu"] = {{"model", facts.cpu_model},
                 {"features", facts.cpu_features},
                 {"cores_online", facts.cores_online},
                 {"cores_allowed", facts.cores_allowed}};
  json["memory"] = {{"bytes", facts.memory_bytes}, {"allowed_bytes", facts.memory_allowed_bytes}};
  json["fabric"] = {
      {"libfabric_version", facts.libfabric_version}, {"providers", providers}, {"efa_devices", facts.efa_devices}};
  json["cuda"] = {
      {"driver_version", facts.cuda_driver_version}, {"devices", devices}, {"nccl_version", facts.nccl_version}};
  // null: unlimited
  json["limits"] = {{"memlock_bytes", limit(facts.memlock_bytes_max)},
                    {"open_files", limit(facts.open_files_max)},
                    {"huge_pages", facts.huge_pages},
                    {"huge_page_bytes", facts.huge_page_bytes},
                    {"shm_bytes", facts.shm_bytes}};
  json["shortfalls"] = missing;
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace moerl
