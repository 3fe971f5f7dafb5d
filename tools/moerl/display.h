#ifndef MOERL_TOOLS_MOERL_DISPLAY_H_
#define MOERL_TOOLS_MOERL_DISPLAY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tools/moerl/panel.h"

namespace moerl {

// Shows a run on standard output: in a terminal a panel that is drawn over, elsewhere a line for each step and
// notice. Thread-compatible.
class Display {
 public:
  explicit Display(std::string run_name);

  // A line of what happened.
  void Notice(const std::string& text);

  // Shows the state; cheap when nothing changed. `rows` as TrainerWatch gives them.
  void Update(const std::optional<v1::GetStatusResponse>& status, const std::vector<v1::StepMetrics>& rows);

 private:
  void DrawPanel();
  void PrintNew();

  const bool is_terminal_;
  const absl::Time start_;
  RunView view_;
  int lines_drawn_ = 0;
  uint64_t step_printed_ = 0;
  std::string phase_printed_;
};

}  // namespace moerl

#endif  // MOERL_TOOLS_MOERL_DISPLAY_H_
