#include "tests/unit/ep/seeds.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string_view>

namespace moerl::ep {
namespace {

uint64_t num_seeds = 0;
uint64_t first_seed = 0;

}  // namespace

SeedRange Seeds(uint64_t default_count) {
  return {first_seed, first_seed + (num_seeds == 0 ? default_count : num_seeds)};
}

}  // namespace moerl::ep

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    constexpr std::string_view kSeeds = "--seeds=", kFirst = "--first-seed=";
    if (arg.starts_with(kSeeds)) {
      moerl::ep::num_seeds = std::strtoull(argv[i] + kSeeds.size(), nullptr, 10);
    } else if (arg.starts_with(kFirst)) {
      moerl::ep::first_seed = std::strtoull(argv[i] + kFirst.size(), nullptr, 10);
    } else {
      std::fprintf(stderr, "unknown argument %s; --seeds=N and --first-seed=S are known\n", argv[i]);
      return 2;
    }
  }
  return RUN_ALL_TESTS();
}
