#include "tools/moerl/display.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"

namespace moerl {
namespace {

constexpr size_t kNoticesKept = 16;
constexpr int kWidthMax = 120;

int TerminalWidth() {
  winsize size{};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return std::min<int>(size.ws_col, kWidthMax);
}

void PrintLine(const std::string& line) {
  std::fprintf(stdout, "%s\n", line.c_str());
  std::fflush(stdout);
}

}  // namespace

Display::Display(std::string run_name, uint64_t num_steps)
    : is_terminal_(isatty(STDOUT_FILENO) == 1), start_(absl::Now()), num_steps_(num_steps) {
  view_.name = std::move(run_name);
}

void Display::Notice(const std::string& text) {
  if (!is_terminal_) return PrintLine(text);
  view_.notices.push_back(absl::StrCat(absl::FormatTime("%H:%M:%S ", absl::Now(), absl::LocalTimeZone()), text));
  if (view_.notices.size() > kNoticesKept) view_.notices.erase(view_.notices.begin());
  DrawPanel();
}

void Display::Conclude(const std::string& text) { PrintLine(text); }

void Display::Update(const std::optional<v1::GetStatusResponse>& status, const std::vector<v1::StepMetrics>& rows) {
  view_.status = status;
  view_.rows = rows;
  if (status.has_value()) num_steps_ = status->num_steps();
  if (is_terminal_) {
    DrawPanel();
  } else {
    PrintNew();
  }
}

void Display::DrawPanel() {
  view_.elapsed = absl::Now() - start_;
  std::string out;
  // Up to the first line of the last drawing; each line is cleared as it is written, and what remains below, too.
  if (lines_drawn_ > 0) absl::StrAppend(&out, "\x1b[", lines_drawn_, "A");
  const std::vector<std::string> lines = RenderPanel(view_, TerminalWidth());
  for (const std::string& line : lines) absl::StrAppend(&out, "\r\x1b[K", line, "\n");
  out += "\x1b[J";
  lines_drawn_ = static_cast<int>(lines.size());
  std::fwrite(out.data(), 1, out.size(), stdout);
  std::fflush(stdout);
}

void Display::PrintNew() {
  for (const v1::StepMetrics& row : view_.rows) {
    if (row.step() <= step_printed_) continue;
    PrintLine(RenderRow(row, num_steps_));
    step_printed_ = row.step();
  }
  if (!view_.status.has_value() || view_.status->phase() != v1::TRAINER_PHASE_WARM_START) return;
  const std::string line = absl::StrFormat("warm start: step %d, pass rate %.3f", view_.status->warm_start_step(),
                                           view_.status->warm_start_pass_rate());
  if (line != phase_printed_) PrintLine(line);
  phase_printed_ = line;
}

}  // namespace moerl
