#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tools/moerl/machine_facts.h"

namespace moerl {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

MachineFacts GoodMachine() {
  MachineFacts facts;
  facts.kernel = "6.1.0-18-amd64";
  facts.cpu_model = "A CPU";
  facts.cpu_features = {"avx2", "fma"};
  facts.cores_online = facts.cores_allowed = 8;
  facts.memory_bytes = facts.memory_allowed_bytes = uint64_t{16} << 30;
  facts.libfabric_version = "1.17";
  facts.providers = {{"net", "117.0"}, {"shm", "117.0"}};
  facts.memlock_bytes_max = 8 << 20;
  facts.open_files_max = 1 << 20;
  facts.shm_bytes = uint64_t{8} << 30;
  facts.huge_page_bytes = 2 << 20;
  facts.has_setpriv = true;
  return facts;
}

std::vector<std::string> Missing(const MachineFacts& facts) {
  std::vector<std::string> names;
  for (const Shortfall& shortfall : FindShortfalls(facts)) names.push_back(shortfall.what);
  return names;
}

TEST(Doctor, FindsNothingMissingOnAGoodMachine) {
  EXPECT_THAT(Missing(GoodMachine()), IsEmpty());
  EXPECT_THAT(FactsTable(GoodMachine(), {}), HasSubstr("Nothing is missing."));
}

TEST(Doctor, NamesWhatIsTooSmallAndTheRemedy) {
  MachineFacts facts = GoodMachine();
  facts.shm_bytes = 64 << 20;
  facts.open_files_max = 1024;
  facts.cores_allowed = 1;
  EXPECT_THAT(Missing(facts), ElementsAre("cores", "open files", "/dev/shm"));
  EXPECT_THAT(FactsTable(facts, FindShortfalls(facts)),
              HasSubstr("/dev/shm: found 64 MiB, wanted 512 MiB or more\n  mount -o remount"));
}

TEST(Doctor, AsksForEfasNeedsOnlyWhereThereIsEfa) {
  MachineFacts facts = GoodMachine();
  facts.efa_devices = {"efa_0"};
  EXPECT_THAT(Missing(facts), ElementsAre("provider efa", "locked memory", "huge pages"));
  facts.providers.push_back({"efa", "118.0"});
  facts.memlock_bytes_max.reset();
  facts.huge_pages = 512;
  EXPECT_THAT(Missing(facts), IsEmpty());
}

TEST(Doctor, OldKernelsAndMissingToolsAreNamed) {
  MachineFacts facts = GoodMachine();
  facts.kernel = "4.19.0";
  facts.has_setpriv = false;
  facts.cpu_features = {};
  facts.providers = {};
  facts.cuda_driver_version = "13.0";
  facts.cuda_devices.resize(2);
  EXPECT_THAT(Missing(facts), ElementsAre("CPU features", "kernel", "setpriv", "libfabric providers", "NCCL"));
}

TEST(Doctor, ItsJsonParsesAndKeepsTypes) {
  MachineFacts facts = GoodMachine();
  facts.memlock_bytes_max.reset();
  facts.cpu_model = "bad \xff byte";
  facts.shm_bytes = 1;
  const nlohmann::json json = nlohmann::json::parse(FactsJson(facts, FindShortfalls(facts)));
  EXPECT_EQ(json["fabric"]["providers"][0]["name"], "net");
  EXPECT_EQ(json["cpu"]["cores_allowed"], 8);
  EXPECT_TRUE(json["limits"]["memlock_bytes"].is_null());
  EXPECT_EQ(json["shortfalls"][0]["what"], "/dev/shm");
}

TEST(Doctor, ReadsThisMachine) {
  const MachineFacts facts = ReadMachineFacts();
  EXPECT_GE(facts.cores_allowed, 1);
  EXPECT_GT(facts.memory_bytes, 0u);
  EXPECT_FALSE(facts.libfabric_version.empty());
  EXPECT_FALSE(facts.providers.empty()) << "libfabric has at least its shm and tcp providers";
}

}  // namespace
}  // namespace moerl
