// The training protocol in a simulated world; see world.h.
//   --seeds=N        seeds for each staleness bound (0, 1, 3)
//   --seed=N         only this seed: replays a violation
//   --mutate=NAME    with this deliberate mistake

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <iostream>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "gtest/gtest.h"
#include "libs/experience/mutant.h"
#include "tests/unit/protocol/world.h"

namespace moerl::protocol_test {
namespace {

constexpr int64_t kStaleness[] = {0, 1, 3};
constexpr int64_t kMutantSeedsMax = 3000;

int64_t num_seeds = 200;
int64_t first_seed = 0;

std::string Describe(int64_t eta, int64_t seed, const RunResult& result) {
  const Violation& first = result.violations.front();
  return absl::StrCat(first.invariant, " eta ", eta, " --seed=", seed, ": ", first.text);
}

// Runs `seeds` seeds and returns the first violation, or "".
std::string Campaign(int64_t seeds, int64_t eta, Faults faults, Storage storage, const std::string& directory) {
  std::map<std::string, int64_t> counts;
  for (int64_t seed = first_seed; seed < first_seed + seeds; ++seed) {
    const RunResult result = RunWorld(static_cast<uint64_t>(seed), eta, faults, storage, directory);
    if (!result.violations.empty()) return Describe(eta, seed, result);
    for (const auto& [what, count] : result.counts) counts[what] += count;
  }
  std::cout << "eta " << eta << ": " << seeds << " seeds, no violation;";
  for (const auto& [what, count] : counts) std::cout << " " << what << " " << count;
  std::cout << std::endl;
  return "";
}

class Protocol : public testing::TestWithParam<int64_t> {};

TEST_P(Protocol, HoldsUnderKillsPausesZombiesBreaksDrainsAndChangesOfRanks) {
  EXPECT_EQ(Campaign(num_seeds, GetParam(), Faults::kAll, Storage::kMemory, ""), "");
}

TEST_P(Protocol, HoldsWithNothingGoingWrong) {
  EXPECT_EQ(Campaign(num_seeds / 10 + 1, GetParam(), Faults::kNone, Storage::kMemory, ""), "");
}

TEST_P(Protocol, HoldsOnSqlite) {
  const std::string directory = absl::StrCat(testing::TempDir(), "/protocol-", getpid(), "-", GetParam());
  std::filesystem::create_directory(directory);
  EXPECT_EQ(Campaign(num_seeds / 100 + 1, GetParam(), Faults::kAll, Storage::kSqlite, directory), "");
  std::filesystem::remove_all(directory);
}

INSTANTIATE_TEST_SUITE_P(Staleness, Protocol, testing::ValuesIn(kStaleness));

// In a process of its own: a broken rule may also trip one of the program's checks.
bool IsCaught(const std::string& name) {
  const pid_t child = fork();
  if (child == 0) {
    if (freopen("/dev/null", "w", stderr) == nullptr) _exit(2);
    mutant = name;
    for (int64_t seed = 0; seed < kMutantSeedsMax; ++seed) {
      for (int64_t eta : kStaleness) {
        const RunResult result = RunWorld(static_cast<uint64_t>(seed), eta, Faults::kAll, Storage::kMemory, "");
        if (result.violations.empty()) continue;
        std::cout << "  " << name << ": " << Describe(eta, seed, result) << std::endl;
        _exit(0);
      }
    }
    _exit(1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return !WIFEXITED(status) || WEXITSTATUS(status) == 0;
}

TEST(Protocol, CatchesEveryDeliberateMistake) {
  for (const std::string& name : kMutants) EXPECT_TRUE(IsCaught(name)) << name;
}

}  // namespace
}  // namespace moerl::protocol_test

int main(int argc, char** argv) {
  using namespace moerl::protocol_test;
  testing::InitGoogleTest(&argc, argv);
  static std::string mutant_name;
  for (int i = 1; i < argc; ++i) {
    absl::string_view arg(argv[i]);
    if (absl::ConsumePrefix(&arg, "--seeds=")) {
      if (!absl::SimpleAtoi(arg, &num_seeds)) return 2;
    } else if (absl::ConsumePrefix(&arg, "--seed=")) {
      if (!absl::SimpleAtoi(arg, &first_seed)) return 2;
      num_seeds = 1;
    } else if (absl::ConsumePrefix(&arg, "--mutate=")) {
      mutant_name = std::string(arg);
      mutant = mutant_name;
    }
  }
  return RUN_ALL_TESTS();
}
