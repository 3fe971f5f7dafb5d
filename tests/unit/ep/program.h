#ifndef MOERL_TESTS_UNIT_EP_PROGRAM_H_
#define MOERL_TESTS_UNIT_EP_PROGRAM_H_

#include <vector>

#include "libs/ep/buffer.h"
#include "tests/unit/ep/draw.h"
#include "tests/unit/ep/scenario.h"

// What the ranks of a scenario do with one buffer.
namespace moerl::ep {

struct Tokens {  // of one rank in one dispatch
  int count = 0;
  std::vector<int32_t> ids;
  std::vector<float> weights;
  std::vector<float> x;
  std::vector<uint16_t> x_bf16;
};

struct Step {
  enum Kind { kDispatch, kRepeat, kCombine } kind = kDispatch;
  int route = 0;  // dispatches and combines: which tokens the routes came from (index into tokens)
  int from = 0;   // combine: the step whose rows it adds; repeat: the step whose handle it reuses
  RowType type = RowType::kFp32;
  bool to_fp8 = false;
  bool is_weighted = true, has_scalars = false, rows_bf16 = false;
};

struct Program {
  std::vector<Step> steps;
  std::vector<std::vector<Tokens>> tokens;  // by step that dispatches, by rank; others empty
};

// Dispatches, repeats along the same routes, and combines of their rows, in the order in which every rank issues them.
Program DrawProgram(const ScenarioConfig& config, Random& random);

}  // namespace moerl::ep

#endif  // MOERL_TESTS_UNIT_EP_PROGRAM_H_
