#include "libs/base/machine.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "libs/base/env.h"

namespace moerl {
namespace {

// A directory that looks like the root of a machine.
class MachineTest : public testing::Test {
 protected:
  void SetUp() override {
    root_ = absl::StrCat(testing::TempDir(), "/machine_test.", getpid());
    ASSERT_TRUE(PosixEnv()->RemoveTree(root_).ok());
  }
  void TearDown() override { EXPECT_TRUE(PosixEnv()->RemoveTree(root_).ok()); }

  void Put(const std::string& path, const std::string& text) {
    ASSERT_TRUE(PosixEnv()->CreateDirs(DirName(root_ + path)).ok());
    ASSERT_TRUE(PosixEnv()->WriteFileDurably(root_ + path, text).ok());
  }

  // By name and label values: "moerl_network_receive_bytes_total/eth0".
  std::map<std::string, double> Read() {
    std::map<std::string, double> values;
    for (const Reading& reading : ReadMachine(root_)) {
      std::string key = reading.name;
      for (const auto& [label, value] : reading.labels) absl::StrAppend(&key, "/", value);
      EXPECT_TRUE(values.emplace(key, reading.value).second) << key << " twice";
    }
    return values;
  }

  std::string root_;
};

TEST_F(MachineTest, AWatchedDiskHasASizeAndFreeBytesOnceItsDirectoryIsThere) {
  WatchDisk("run", root_ + "/run");
  EXPECT_FALSE(Read().contains("moerl_disk_size_bytes/run"));
  Put("/run/file", "text");
  auto values = Read();
  EXPECT_GT(values["moerl_disk_size_bytes/run"], 0);
  EXPECT_LE(values["moerl_disk_free_bytes/run"], values["moerl_disk_size_bytes/run"]);
}

TEST_F(MachineTest, CgroupLimitsAreTheTightestOnTheWayUp) {
  Put("/proc/self/cgroup", "0::/pod/box\n");
  Put("/sys/fs/cgroup/pod/box/memory.max", "max\n");
  Put("/sys/fs/cgroup/pod/box/cpu.max", "400000 100000\n");
  Put("/sys/fs/cgroup/pod/memory.max", "8589934592\n");
  Put("/sys/fs/cgroup/pod/cpu.max", "150000 100000\n");
  Put("/sys/fs/cgroup/pod/box/memory.current", "1000\n");
  Put("/sys/fs/cgroup/pod/box/memory.stat", "anon 5\nshmem 700\n");
  Put("/sys/fs/cgroup/pod/box/cpu.stat", "usage_usec 2500000\nthrottled_usec 500000\n");
  Put("/sys/fs/cgroup/pod/box/memory.pressure", "some avg10=0.00 total=3000000\nfull avg10=0.00 total=1000000\n");
  EXPECT_EQ(ReadCgroupLimits(root_).memory_bytes, 8589934592u);
  EXPECT_EQ(ReadCgroupLimits(root_).cpu_cores, 1.5);
  auto values = Read();
  EXPECT_EQ(values["moerl_cgroup_memory_limit_bytes"], 8589934592.0);
  EXPECT_EQ(values["moerl_cgroup_memory_usage_bytes"], 1000);
  EXPECT_EQ(values["moerl_cgroup_memory_shared_bytes"], 700);
  EXPECT_EQ(values["moerl_cgroup_cpu_usage_seconds_total"], 2.5);
  EXPECT_EQ(values["moerl_cgroup_cpu_throttled_seconds_total"], 0.5);
  EXPECT_EQ(values["moerl_pressure_stalled_seconds_total/memory/some"], 3);
  EXPECT_EQ(values["moerl_pressure_stalled_seconds_total/memory/full"], 1);
}

TEST_F(MachineTest, CgroupVersionOneIsRead) {
  Put("/proc/self/cgroup", "4:memory:/a\n1:cpu:/\n2:cpuacct:/host/path\n0::/\n");
  Put("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "1048576\n");
  Put("/sys/fs/cgroup/memory/a/memory.usage_in_bytes", "4096\n");
  Put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  Put("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  Put("/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  Put("/sys/fs/cgroup/cpuacct/cpuacct.usage", "1500000000\n");
  Put("/proc/pressure/cpu", "some avg10=0.00 avg60=0.00 avg300=0.00 total=4000000\n");
  EXPECT_EQ(ReadCgroupLimits(root_).memory_bytes, 1048576u);
  EXPECT_FALSE(ReadCgroupLimits(root_).cpu_cores.has_value());
  auto values = Read();
  EXPECT_EQ(values["moerl_cgroup_memory_usage_bytes"], 4096);
  EXPECT_EQ(values["moerl_cgroup_cpu_usage_seconds_total"], 1.5);
  EXPECT_EQ(values["moerl_pressure_stalled_seconds_total/cpu/some"], 4);
}

TEST_F(MachineTest, ControllersThatShareAHierarchyAreFoundByTheirLinks) {
  Put("/proc/self/cgroup", "5:memory:/\n4:cpu,cpuacct:/host/path\n0::/\n");
  Put("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "250000\n");
  Put("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  Put("/sys/fs/cgroup/cpu,cpuacct/cpuacct.usage", "3000000000\n");
  for (const char* name : {"cpu", "cpuacct"}) {
    ASSERT_EQ(symlink("cpu,cpuacct", absl::StrCat(root_, "/sys/fs/cgroup/", name).c_str()), 0);
  }
  EXPECT_EQ(ReadCgroupLimits(root_).cpu_cores, 2.5);
  EXPECT_EQ(Read()["moerl_cgroup_cpu_usage_seconds_total"], 3);
}

TEST_F(MachineTest, NetworkBytesAreByInterface) {
  Put("/proc/net/dev",
      "Inter-|   Receive                                                |  Transmit\n"
      " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls\n"
      "    lo: 10 1 0 0 0 0 0 0 10 1 0 0 0 0 0 0\n"
      "  eth0:3399 6 0 0 0 0 0 0 3019 4 0 0 0 0 0 0\n");
  auto values = Read();
  EXPECT_EQ(values["moerl_network_receive_bytes_total/eth0"], 3399);
  EXPECT_EQ(values["moerl_network_transmit_bytes_total/eth0"], 3019);
  EXPECT_EQ(values["moerl_network_receive_bytes_total/lo"], 10);
}

TEST_F(MachineTest, WhatTheKernelDoesNotTellIsAbsent) { EXPECT_TRUE(Read().empty()); }

TEST(Machine, TheRealOneHasAProcessWithMemoryAndCpuTime) {
  std::set<std::string> names;
  for (const Reading& reading : ReadMachine()) names.insert(reading.name);
  for (const char* name : {"process_cpu_seconds_total", "process_resident_memory_bytes", "process_virtual_memory_bytes",
                           "process_start_time_seconds", "process_open_fds", "process_max_fds"}) {
    EXPECT_TRUE(names.contains(name)) << name;
  }
  EXPECT_GE(AllowedCores(), 1);
  EXPECT_GT(AllowedMemoryBytes(), uint64_t{1} << 20);
}

}  // namespace
}  // namespace moerl
