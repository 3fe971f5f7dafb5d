#include "tests/unit/ep/program.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "libs/ep/row_math.h"

namespace moerl::ep {

Program DrawProgram(const ScenarioConfig& c, Random& random) {
  Program program;
  std::vector<int> open;
  const int ranks = static_cast<int>(c.node_of.size());
  const int dispatches = Draw(random, 1, c.dispatches_max);
  const auto add = [&](Step step, std::vector<Tokens> tokens) {
    program.steps.push_back(step);
    program.tokens.push_back(std::move(tokens));
    return static_cast<int>(program.steps.size()) - 1;
  };
  const auto draw_x = [&](const Step& step, Tokens* tokens) {
    tokens->x.resize(static_cast<size_t>(tokens->count) * c.hidden);
    for (float& value : tokens->x) value = DrawFloat(random);
    if (step.type == RowType::kFp32) return;
    tokens->x_bf16.resize(tokens->x.size());
    for (size_t i = 0; i < tokens->x.size(); ++i) {
      tokens->x_bf16[i] = Bf16FromFloat(tokens->x[i]);
      tokens->x[i] = FloatFromBf16(tokens->x_bf16[i]);
    }
  };
  for (int d = 0; d < dispatches; ++d) {
    Step step;
    step.type = Chance(random, 0.5) ? RowType::kBf16 : RowType::kFp32;
    step.to_fp8 = Chance(random, 0.2);
    step.route = static_cast<int>(program.steps.size());
    const int top_k = Draw(random, 1, c.top_k);
    const int hot = Chance(random, 0.2) ? Draw(random, 0, c.num_experts - 1) : -1;
    std::vector<Tokens> all(ranks);
    for (Tokens& tokens : all) {
      tokens.count = Chance(random, 0.3) ? 0 : Draw(random, 1, c.tokens_max);
      tokens.ids.assign(static_cast<size_t>(tokens.count) * c.top_k, -1);
      for (int t = 0; t < tokens.count; ++t) {
        std::set<int> chosen;
        const int want = hot >= 0 ? 1 : Draw(random, 0, std::min(top_k, c.num_experts));
        while (static_cast<int>(chosen.size()) < want) {
          chosen.insert(hot >= 0 ? hot : Draw(random, 0, c.num_experts - 1));
        }
        std::vector<int> places(c.top_k);
        std::iota(places.begin(), places.end(), 0);
        std::shuffle(places.begin(), places.end(), random);
        int next = 0;
        for (const int expert : chosen) tokens.ids[t * c.top_k + places[next++]] = expert;
      }
      tokens.weights.resize(tokens.ids.size());
      for (float& weight : tokens.weights) weight = DrawFloat(random);
      draw_x(step, &tokens);
    }
    open.push_back(add(step, std::move(all)));
    if (Chance(random, 0.4)) {  // other rows along the same routes, as backward does
      Step repeat = step;
      repeat.kind = Step::kRepeat;
      repeat.from = open.back();
      repeat.type = Chance(random, 0.5) ? RowType::kBf16 : RowType::kFp32;
      std::vector<Tokens> again = program.tokens[step.route];
      for (Tokens& tokens : again) {
        tokens.x_bf16.clear();
        draw_x(repeat, &tokens);
      }
      open.push_back(add(repeat, std::move(again)));
    }
    while (!open.empty() && Chance(random, 0.5)) {
      Step combine;
      combine.kind = Step::kCombine;
      const int at = Draw(random, 0, static_cast<int>(open.size()) - 1);
      combine.from = open[at];
      combine.route = program.steps[open[at]].route;
      combine.is_weighted = Chance(random, 0.6);
      combine.has_scalars = Chance(random, 0.5);
      combine.rows_bf16 = Chance(random, 0.3);
      if (Chance(random, 0.7)) open.erase(open.begin() + at);
      add(combine, {});
    }
  }
  for (const int from : open) {
    Step combine;
    combine.kind = Step::kCombine;
    combine.from = from;
    combine.route = program.steps[from].route;
    add(combine, {});
  }
  return program;
}

}  // namespace moerl::ep
