#include "libs/base/machine.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "absl/base/thread_annotations.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "libs/base/env.h"

namespace moerl {
namespace {

using Kind = Reading::Kind;
using Labels = std::vector<std::pair<std::string, std::string>>;

constexpr uint64_t kFileBytesMax = 1 << 20;

struct WatchedDisks {
  absl::Mutex mutex;
  std::map<std::string, std::string> directories ABSL_GUARDED_BY(mutex);  // by volume
};

WatchedDisks& Disks() {
  static auto& disks = *new WatchedDisks();
  return disks;
}

// Empty when it cannot be read.
std::string ReadText(const std::string& path) {
  return PosixEnv()->ReadFile(path, kFileBytesMax).value_or(std::string());
}

std::vector<absl::string_view> Words(absl::string_view line) {
  return absl::StrSplit(line, absl::ByAnyChar(" \t\n"), absl::SkipEmpty());
}

std::optional<double> Number(absl::string_view text) {
  double value = 0;
  if (!absl::SimpleAtod(absl::StripAsciiWhitespace(text), &value)) return std::nullopt;
  return value;
}

// The number after `key` in a file of "key value" lines ("VmRSS:  12 kB", "usage_usec 12").
std::optional<double> Keyed(absl::string_view text, absl::string_view key) {
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    const std::vector<absl::string_view> words = Words(line);
    if (words.size() >= 2 && words[0] == key) return Number(words[1]);
  }
  return std::nullopt;
}

// --- Cgroups: version 2, and version 1 where memory and CPU are still under it

constexpr char kCgroupMount[] = "/sys/fs/cgroup";
// Version 1 writes "no limit" as the largest number of whole pages.
constexpr double kNoLimit = 9e18;

// A cgroup's directory and the mount it lies under; the directories between them may limit it, too.
struct CgroupDir {
  std::string mount;
  std::string dir;
};

bool IsDirectory(const std::string& path) { return PosixEnv()->List(path).ok(); }  // a link to one, too

// The directory of this process's cgroup under a controller of version 1, or, for "", under version 2. Controllers may
// share a hierarchy ("4:cpu,cpuacct:/pod"); each has a link of its own name beside that mount then.
std::optional<CgroupDir> FindCgroup(const std::string& root, absl::string_view controller) {
  for (absl::string_view line : absl::StrSplit(ReadText(root + "/proc/self/cgroup"), '\n')) {
    const std::vector<absl::string_view> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    const std::vector<absl::string_view> controllers = absl::StrSplit(parts[1], ',');
    if (std::find(controllers.begin(), controllers.end(), controller) == controllers.end()) continue;
    absl::string_view path = parts[2];
    absl::ConsumeSuffix(&path, "/");
    CgroupDir found;
    found.mount = absl::StrCat(root, kCgroupMount, controller.empty() ? "" : "/", controller);
    found.dir = absl::StrCat(found.mount, path);
    // In a container the path is often the host's, and the mount shows the container's own cgroup.
    if (!IsDirectory(found.dir)) found.dir = found.mount;
    if (!IsDirectory(found.dir)) return std::nullopt;
    return found;
  }
  return std::nullopt;
}

// Calls `visit` with the cgroup's directory and each above it, up to the mount.
template <typename Visit>
void ForEachLevel(const std::optional<CgroupDir>& cgroup, Visit visit) {
  if (!cgroup.has_value()) return;
  for (std::string dir = cgroup->dir; dir.size() >= cgroup->mount.size(); dir = dir.substr(0, dir.rfind('/'))) {
    visit(dir);
  }
}

template <typename T>
void Tighten(std::optional<T>& limit, std::optional<T> other) {
  if (other.has_value() && (!limit.has_value() || *other < *limit)) limit = other;
}

void TightenMemory(std::optional<uint64_t>& limit, std::optional<double> bytes) {
  if (bytes.has_value() && *bytes < kNoLimit) Tighten(limit, std::optional<uint64_t>(static_cast<uint64_t>(*bytes)));
}

// "max 100000" or "150000 100000": quota and period.
std::optional<double> CoresOf(absl::string_view cpu_max) {
  const std::vector<absl::string_view> words = Words(cpu_max);
  if (words.size() != 2) return std::nullopt;
  const std::optional<double> quota = Number(words[0]);
  const std::optional<double> period = Number(words[1]);
  if (!quota.has_value() || !period.has_value() || *period <= 0) return std::nullopt;
  return *quota / *period;
}

// --- Readings

class Readings {
 public:
  void Gauge(const char* name, const char* help, std::optional<double> value, Labels labels = {}) {
    Add(name, help, Kind::kGauge, value, std::move(labels));
  }
  void Counter(const char* name, const char* help, std::optional<double> value, Labels labels = {}) {
    Add(name, help, Kind::kCounter, value, std::move(labels));
  }
  std::vector<Reading> Take() { return std::move(readings_); }

 private:
  void Add(const char* name, const char* help, Kind kind, std::optional<double> value, Labels labels) {
    if (value.has_value()) readings_.push_back({name, help, kind, std::move(labels), *value});
  }

  std::vector<Reading> readings_;
};

std::optional<double> Scaled(std::optional<double> value, double factor) {
  if (value.has_value()) *value *= factor;
  return value;
}

void ReadProcess(const std::string& root, Readings& out) {
  // The fields of /proc/self/stat after the program's name, which may hold spaces and ")".
  const std::string stat = ReadText(root + "/proc/self/stat");
  const size_t name_end = stat.rfind(')');
  if (name_end == std::string::npos) return;
  const std::vector<absl::string_view> fields = Words(absl::string_view(stat).substr(name_end + 1));
  constexpr size_t kUserTicks = 11, kSystemTicks = 12, kThreads = 17, kStartTicks = 19;
  if (fields.size() <= kStartTicks) return;
  const double ticks_per_s = static_cast<double>(sysconf(_SC_CLK_TCK));
  const auto field = [&](size_t index) { return Number(fields[index]).value_or(0); };
  out.Counter("process_cpu_seconds_total", "User and system CPU time spent, in seconds.",
              (field(kUserTicks) + field(kSystemTicks)) / ticks_per_s);
  const std::string status = ReadText(root + "/proc/self/status");
  out.Gauge("process_resident_memory_bytes", "Resident memory in bytes.", Scaled(Keyed(status, "VmRSS:"), 1024));
  out.Gauge("process_virtual_memory_bytes", "Virtual memory in bytes.", Scaled(Keyed(status, "VmSize:"), 1024));
  out.Gauge("process_threads", "Threads.", field(kThreads));
  if (const auto boot = Keyed(ReadText(root + "/proc/stat"), "btime"); boot.has_value()) {
    out.Gauge("process_start_time_seconds", "Start of the process, in seconds since the Unix epoch.",
              *boot + field(kStartTicks) / ticks_per_s);
  }
  const auto files = PosixEnv()->List(root + "/proc/self/fd");
  if (files.ok()) out.Gauge("process_open_fds", "Open file descriptors.", static_cast<double>(files->size()));
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    out.Gauge("process_max_fds", "Largest number of open file descriptors.", static_cast<double>(limit.rlim_cur));
  }
}

void ReadCgroup(const std::string& root, Readings& out) {
  const CgroupLimits limits = ReadCgroupLimits(root);
  if (limits.memory_bytes.has_value()) {
    out.Gauge("moerl_cgroup_memory_limit_bytes", "Memory the cgroup may use; absent without a limit.",
              static_cast<double>(*limits.memory_bytes));
  }
  out.Gauge("moerl_cgroup_cpu_limit_cores", "Cores the cgroup may use; absent without a limit.", limits.cpu_cores);

  std::optional<double> memory, shared, cpu_s, throttled_s;
  if (const auto v2 = FindCgroup(root, ""); v2.has_value()) {
    memory = Number(ReadText(v2->dir + "/memory.current"));
    shared = Keyed(ReadText(v2->dir + "/memory.stat"), "shmem");
    const std::string cpu = ReadText(v2->dir + "/cpu.stat");
    cpu_s = Scaled(Keyed(cpu, "usage_usec"), 1e-6);
    throttled_s = Scaled(Keyed(cpu, "throttled_usec"), 1e-6);
  }
  if (const auto v1 = FindCgroup(root, "memory"); v1.has_value() && !memory.has_value()) {
    memory = Number(ReadText(v1->dir + "/memory.usage_in_bytes"));
    shared = Keyed(ReadText(v1->dir + "/memory.stat"), "shmem");
  }
  if (const auto v1 = FindCgroup(root, "cpuacct"); v1.has_value()) {
    cpu_s = Scaled(Number(ReadText(v1->dir + "/cpuacct.usage")), 1e-9);
  }
  if (const auto v1 = FindCgroup(root, "cpu"); v1.has_value()) {
    throttled_s = Scaled(Keyed(ReadText(v1->dir + "/cpu.stat"), "throttled_time"), 1e-9);
  }
  out.Gauge("moerl_cgroup_memory_usage_bytes", "Memory the cgroup uses, page cache included.", memory);
  out.Gauge("moerl_cgroup_memory_shared_bytes", "Shared memory (tmpfs, /dev/shm) the cgroup uses.", shared);
  out.Counter("moerl_cgroup_cpu_usage_seconds_total", "CPU time the cgroup used.", cpu_s);
  out.Counter("moerl_cgroup_cpu_throttled_seconds_total", "Time the cgroup was kept from running by its quota.",
              throttled_s);
}

// "some avg10=0.00 avg60=0.00 avg300=0.00 total=123" in microseconds, and the same with "full".
void ReadPressure(const std::string& root, Readings& out) {
  const std::optional<CgroupDir> cgroup = FindCgroup(root, "");
  for (const char* resource : {"cpu", "io", "memory"}) {
    std::string text;
    if (cgroup.has_value()) text = ReadText(absl::StrCat(cgroup->dir, "/", resource, ".pressure"));
    if (text.empty()) text = ReadText(absl::StrCat(root, "/proc/pressure/", resource));
    for (absl::string_view line : absl::StrSplit(text, '\n')) {
      const std::vector<absl::string_view> words = Words(line);
      if (words.size() < 2) continue;
      absl::string_view total = words.back();
      if (!absl::ConsumePrefix(&total, "total=")) continue;
      out.Counter("moerl_pressure_stalled_seconds_total",
                  "Time in which some or all tasks of the cgroup (else of the machine) waited for the resource.",
                  Scaled(Number(total), 1e-6), {{"resource", resource}, {"tasks", std::string(words[0])}});
    }
  }
}

void ReadSharedMemory(const std::string& root, Readings& out) {
  struct statvfs info;
  if (statvfs((root + "/dev/shm").c_str(), &info) != 0) return;
  const double block = static_cast<double>(info.f_frsize);
  out.Gauge("moerl_shm_size_bytes", "Size of /dev/shm.", block * static_cast<double>(info.f_blocks));
  out.Gauge("moerl_shm_free_bytes", "Free bytes of /dev/shm.", block * static_cast<double>(info.f_bavail));
}

void ReadDisks(Readings& out) {
  std::map<std::string, std::string> directories;
  {
    absl::MutexLock lock(&Disks().mutex);
    directories = Disks().directories;
  }
  std::map<std::string, struct statvfs> found;
  for (const auto& [volume, directory] : directories) {
    struct statvfs info;
    if (statvfs(directory.c_str(), &info) == 0) found[volume] = info;
  }
  const auto bytes = [](const struct statvfs& info, uint64_t blocks) {
    return static_cast<double>(info.f_frsize) * static_cast<double>(blocks);
  };
  for (const auto& [volume, info] : found) {
    out.Gauge("moerl_disk_size_bytes", "Size of the file system that holds the volume.", bytes(info, info.f_blocks),
              {{"volume", volume}});
  }
  for (const auto& [volume, info] : found) {
    out.Gauge("moerl_disk_free_bytes", "Bytes free to this process there.", bytes(info, info.f_bavail),
              {{"volume", volume}});
  }
}

void ReadNetwork(const std::string& root, Readings& out) {
  struct Interface {
    std::string name;
    double received;
    double sent;
  };
  std::vector<Interface> interfaces;
  for (absl::string_view line : absl::StrSplit(ReadText(root + "/proc/net/dev"), '\n')) {
    // "eth0: received-bytes 7 more  sent-bytes ..."
    const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(line, absl::MaxSplits(':', 1));
    const std::vector<absl::string_view> columns = Words(parts.second);
    if (columns.size() < 9) continue;
    interfaces.push_back({std::string(absl::StripAsciiWhitespace(parts.first)), Number(columns[0]).value_or(0),
                          Number(columns[8]).value_or(0)});
  }
  for (const Interface& interface : interfaces) {
    out.Counter("moerl_network_receive_bytes_total", "Bytes the interface received.", interface.received,
                {{"interface", interface.name}});
  }
  for (const Interface& interface : interfaces) {
    out.Counter("moerl_network_transmit_bytes_total", "Bytes the interface sent.", interface.sent,
                {{"interface", interface.name}});
  }
}

}  // namespace

CgroupLimits ReadCgroupLimits(const std::string& root) {
  CgroupLimits limits;
  ForEachLevel(FindCgroup(root, ""), [&](const std::string& dir) {
    TightenMemory(limits.memory_bytes, Number(ReadText(dir + "/memory.max")));
    Tighten(limits.cpu_cores, CoresOf(ReadText(dir + "/cpu.max")));
  });
  ForEachLevel(FindCgroup(root, "memory"), [&](const std::string& dir) {
    TightenMemory(limits.memory_bytes, Number(ReadText(dir + "/memory.limit_in_bytes")));
  });
  ForEachLevel(FindCgroup(root, "cpu"), [&](const std::string& dir) {
    const std::string quota = ReadText(dir + "/cpu.cfs_quota_us");
    if (Number(quota).value_or(-1) < 0) return;
    Tighten(limits.cpu_cores, CoresOf(absl::StrCat(quota, " ", ReadText(dir + "/cpu.cfs_period_us"))));
  });
  return limits;
}

int AllowedCores() {
  cpu_set_t set;
  const int by_affinity =
      sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  const double by_quota = ReadCgroupLimits().cpu_cores.value_or(std::numeric_limits<int>::max());
  return std::max(1, static_cast<int>(std::min<double>(by_affinity, std::floor(by_quota))));
}

uint64_t AllowedMemoryBytes() {
  const uint64_t machine =
      static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return std::min(machine, ReadCgroupLimits().memory_bytes.value_or(machine));
}

void WatchDisk(const std::string& volume, const std::string& directory) {
  absl::MutexLock lock(&Disks().mutex);
  Disks().directories[volume] = directory;
}

std::vector<Reading> ReadMachine(const std::string& root) {
  Readings readings;
  ReadProcess(root, readings);
  ReadCgroup(root, readings);
  ReadPressure(root, readings);
  ReadSharedMemory(root, readings);
  ReadDisks(readings);
  ReadNetwork(root, readings);
  return readings.Take();
}

}  // namespace moerl
