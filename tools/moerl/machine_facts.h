#ifndef MOERL_TOOLS_MOERL_MACHINE_FACTS_H_
#define MOERL_TOOLS_MOERL_MACHINE_FACTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

// What a machine offers to moerl, and what it lacks: the contents of `moerl doctor`.
namespace moerl {

struct FabricProvider {
  std::string name;     // "net", "tcp", "shm", "efa", …
  std::string version;  // "117.0"
};

struct CudaDevice {
  std::string name;
  uint64_t memory_bytes = 0;
  std::string compute_capability;  // "9.0"
};

struct MachineFacts {
  std::string kernel;  // "6.1.0"
  std::string cpu_model;
  std::vector<std::string> cpu_features;  // those that kernels of moerl use, as /proc/cpuinfo names them
  int cores_online = 0;
  int cores_allowed = 0;  // after affinity mask and cgroup quota
  uint64_t memory_bytes = 0;
  uint64_t memory_allowed_bytes = 0;  // after the cgroup's limit

  std::string libfabric_version;  // "1.17"
  std::vector<FabricProvider> providers;
  std::vector<std::string> efa_devices;

  std::string cuda_driver_version;  // of the driver's API, "13.0"; empty without a driver
  std::vector<CudaDevice> cuda_devices;
  std::string nccl_version;  // empty when there is no libnccl

  std::optional<uint64_t> memlock_bytes_max;  // absent: unlimited
  std::optional<uint64_t> open_files_max;     // the hard limit; absent: unlimited
  uint64_t huge_pages = 0;
  uint64_t huge_page_bytes = 0;
  uint64_t shm_bytes = 0;  // size of /dev/shm
  bool has_setpriv = false;
};

// Asks the machine. Loads libcuda and libnccl when they are there; nothing needs them to be.
MachineFacts ReadMachineFacts();

// Something that is missing or too small, and what to do about it.
struct Shortfall {
  std::string what;    // "open files"
  std::string found;   // "1,024"
  std::string wanted;  // "17,408 or more"
  std::string remedy;  // "raise the hard limit: …"
};

// Judges the facts. Pure.
std::vector<Shortfall> FindShortfalls(const MachineFacts& facts);

// The table and the JSON object that `moerl doctor` prints. Pure.
std::string FactsTable(const MachineFacts& facts, const std::vector<Shortfall>& shortfalls);
std::string FactsJson(const MachineFacts& facts, const std::vector<Shortfall>& shortfalls);

}  // namespace moerl

#endif  // MOERL_TOOLS_MOERL_MACHINE_FACTS_H_
