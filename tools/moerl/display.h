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
  // `num_steps` of the run; 0 where only its trainer knows.
  Display(std::string run_name, uint64_t num_steps);

  // A line of what happened.
  void Notice(const std::string& text);

  // How it ended, below the panel: whole, where a notice would be cut.
  void Conclude(const std::string& text);

  // Shows the state; cheap when nothing changed. `rows` as TrainerWatch gives them.
  void Update(const std::optional<v1::GetStatusResponse>& status, const std::vector<v1::StepMetrics>& rows);

 private:
  void DrawPanel();
  void PrintNew();

  const bool is_terminal_;
  const absl::Time start_;
  RunView view_;
  uint64_t num_steps_;
  int lines_drawn_ = 0;
  uint64_t step_printed_ = 0;
  std::string phase_printed_;
};

}  // namespace moerl

#endif  // MOERL_TOOLS_MOERL_DISPLAY_H_
