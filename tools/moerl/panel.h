#ifndef MOERL_TOOLS_MOERL_PANEL_H_
#define MOERL_TOOLS_MOERL_PANEL_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "moerl/v1/trainer.pb.h"

// How a run is shown in a terminal. Pure: data in, text out.
namespace moerl {

struct RunView {
  std::string name;
  std::optional<v1::GetStatusResponse> status;  // absent while the trainer does not answer
  std::vector<v1::StepMetrics> rows;
  std::vector<std::string> notices;  // the latest last
  absl::Duration elapsed;
};

// The panel: lines without line ends, none wider than `width` columns (at least 40).
std::vector<std::string> RenderPanel(const RunView& view, int width);

// One step as one line, for where there is no terminal.
std::string RenderRow(const v1::StepMetrics& row, uint64_t num_steps);

// "waiting", "warm_start", …: the phase in lower case.
std::string PhaseName(v1::TrainerPhase phase);

// The last `width` values as blocks of eight heights between their least and greatest; a flat line when all are equal.
std::string Sparkline(absl::Span<const double> values, int width);

// "42s", "3m 05s", "2h 10m".
std::string ShortDuration(absl::Duration duration);

}  // namespace moerl

#endif  // MOERL_TOOLS_MOERL_PANEL_H_
