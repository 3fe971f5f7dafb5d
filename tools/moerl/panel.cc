#include "tools/moerl/panel.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"

namespace moerl {
namespace {

constexpr int kRowsForTimeLeft = 20;
constexpr size_t kNoticesShown = 4;
constexpr int kWorkersShown = 8;
constexpr int kLabelColumns = 10;

// Columns a terminal uses for `text`: one for each UTF-8 character here.
int Columns(absl::string_view text) {
  return static_cast<int>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

// One line of at most `width` columns; a message may have several, as a Python error has.
std::string Cut(std::string text, int width) {
  std::replace_if(
      text.begin(), text.end(), [](char c) { return absl::ascii_iscntrl(static_cast<uint8_t>(c)); }, ' ');
  if (Columns(text) <= width) return text;
  size_t bytes = 0;
  for (int columns = 0; bytes < text.size(); ++bytes) {
    if ((text[bytes] & 0xc0) != 0x80 && columns++ == width - 1) break;
  }
  return absl::StrCat(text.substr(0, bytes), "…");
}

std::string Labelled(absl::string_view label, absl::string_view text) {
  return absl::StrCat(absl::StrFormat("%-*s", kLabelColumns, label), text);
}

// 20480 as "20,480".
std::string WithCommas(uint64_t value) {
  const std::string digits = absl::StrCat(value);
  std::string out;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) out += ',';
    out += digits[i];
  }
  return out;
}

std::string Bar(double fraction, int width) {
  static constexpr std::array<const char*, 8> kEighths = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  const int eighths = static_cast<int>(std::clamp(fraction, 0.0, 1.0) * width * 8);
  std::string bar;
  for (int i = 0; i < eighths / 8; ++i) bar += "█";
  bar += kEighths[eighths % 8];
  for (int used = Columns(bar); used < width; ++used) bar += "·";
  return bar;
}

std::optional<absl::Duration> TimeLeft(const RunView& view) {
  if (!view.status.has_value() || view.rows.empty() || view.status->step() >= view.status->num_steps())
    return std::nullopt;
  const size_t count = std::min<size_t>(view.rows.size(), kRowsForTimeLeft);
  double seconds = 0;
  for (size_t i = view.rows.size() - count; i < view.rows.size(); ++i) seconds += view.rows[i].step_seconds();
  return absl::Seconds(seconds / static_cast<double>(count) *
                       static_cast<double>(view.status->num_steps() - view.status->step()));
}

std::string Headline(const RunView& view, int width) {
  std::string line = absl::StrCat("moerl ", view.name);
  if (!view.status.has_value()) return absl::StrCat(line, "  starting, ", ShortDuration(view.elapsed));
  const v1::GetStatusResponse& status = *view.status;
  if (status.phase() == v1::TRAINER_PHASE_WARM_START) {
    return absl::StrCat(line, "  warm start, step ", status.warm_start_step(),
                        absl::StrFormat(", pass rate %.3f, ", status.warm_start_pass_rate()),
                        ShortDuration(view.elapsed));
  }
  const double done =
      status.num_steps() == 0 ? 0 : static_cast<double>(status.step()) / static_cast<double>(status.num_steps());
  absl::StrAppend(&line, "  step ", status.step(), "/", status.num_steps(), "  ");
  const std::optional<absl::Duration> left = TimeLeft(view);
  const std::string tail = absl::StrFormat(" %3.0f %%  %s%s", done * 100, ShortDuration(left.value_or(view.elapsed)),
                                           left.has_value() ? " left" : "");
  const int bar = width - Columns(line) - Columns(tail);
  return absl::StrCat(line, bar >= 4 ? Bar(done, std::min(bar, 40)) : "", tail);
}

void AppendLearning(const RunView& view, int width, std::vector<std::string>& lines) {
  if (view.rows.empty()) return;
  std::vector<double> rewards, pass_rates;
  for (const v1::StepMetrics& row : view.rows) {
    rewards.push_back(row.reward_mean());
    pass_rates.push_back(row.pass_rate());
  }
  const int spark = std::max(8, width - kLabelColumns - 10);
  lines.push_back(Labelled("reward", absl::StrFormat("%7.3f  %s", rewards.back(), Sparkline(rewards, spark))));
  lines.push_back(Labelled("pass rate", absl::StrFormat("%7.3f  %s", pass_rates.back(), Sparkline(pass_rates, spark))));
}

void AppendLastStep(const RunView& view, std::vector<std::string>& lines) {
  if (view.rows.empty()) return;
  const v1::StepMetrics& row = view.rows.back();
  lines.push_back(
      Labelled("speed", absl::StrFormat("%s tokens/s, step %.2f s: wait %.2f, train %.2f, publish %.2f",
                                        WithCommas(static_cast<uint64_t>(row.tokens_per_second())), row.step_seconds(),
                                        row.wait_seconds(), row.train_seconds(), row.publish_seconds())));
  uint64_t stalest = 0;
  for (int i = 0; i < row.staleness_histogram_size(); ++i) {
    if (row.staleness_histogram(i) > 0) stalest = i;
  }
  lines.push_back(Labelled(
      "numerics", absl::StrFormat("mismatch %g over %s tokens, staleness %d, grad norm %.3g", row.max_abs_mismatch(),
                                  WithCommas(row.mismatch_tokens()), stalest, row.grad_norm())));
}

void AppendProcesses(const v1::GetStatusResponse& status, std::vector<std::string>& lines) {
  std::string trainer = absl::StrCat(PhaseName(status.phase()), ", weights v", status.weight_version().number(),
                                     ", checkpoint at ", status.checkpoint_step());
  if (!status.waiting_for().empty()) absl::StrAppend(&trainer, "; waits for ", status.waiting_for());
  lines.push_back(Labelled("trainer", trainer));
  for (int i = 0; i < std::min(status.workers_size(), kWorkersShown); ++i) {
    const v1::WorkerStatus& worker = status.workers(i);
    lines.push_back(Labelled(i == 0 ? "rollouts" : "",
                             absl::StrCat(worker.worker(), worker.is_connected() ? "" : " (away)", " v",
                                          worker.weight_version().number(), ", ", worker.num_leases(), " leases")));
  }
  if (status.workers_size() > kWorkersShown) {
    lines.push_back(Labelled("", absl::StrCat("and ", status.workers_size() - kWorkersShown, " more")));
  }
}

}  // namespace

std::vector<std::string> RenderPanel(const RunView& view, int width) {
  width = std::max(width, 40);
  std::vector<std::string> lines = {Headline(view, width)};
  AppendLearning(view, width, lines);
  AppendLastStep(view, lines);
  if (view.status.has_value()) AppendProcesses(*view.status, lines);
  const size_t first = view.notices.size() - std::min(view.notices.size(), kNoticesShown);
  for (size_t i = first; i < view.notices.size(); ++i)
    lines.push_back(Labelled(i == first ? "events" : "", view.notices[i]));
  for (std::string& line : lines) line = Cut(std::move(line), width);
  return lines;
}

std::string RenderRow(const v1::StepMetrics& row, uint64_t num_steps) {
  std::string line = absl::StrFormat(
      "step %d/%d  reward %.3f  pass rate %.3f  mismatch %g over %d tokens  weights v%d  %.2f s  %.0f tokens/s",
      row.step(), num_steps, row.reward_mean(), row.pass_rate(), row.max_abs_mismatch(), row.mismatch_tokens(),
      row.weight_version(), row.step_seconds(), row.tokens_per_second());
  if (row.has_eval_pass_rate()) absl::StrAppendFormat(&line, "  held-out pass rate %.3f", row.eval_pass_rate());
  if (row.is_skipped()) line += "  skipped: gradient not finite";
  return line;
}

std::string PhaseName(v1::TrainerPhase phase) {
  absl::string_view name = v1::TrainerPhase_Name(phase);
  absl::ConsumePrefix(&name, "TRAINER_PHASE_");
  return absl::AsciiStrToLower(name);
}

std::string Sparkline(absl::Span<const double> values, int width) {
  static constexpr std::array<const char*, 8> kBlocks = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  if (values.empty() || width <= 0) return "";
  values = values.last(std::min<size_t>(values.size(), width));
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  const double range = *high - *low;
  std::string line;
  for (double value : values) {
    const double height = range > 0 ? (value - *low) / range * 7.999 : 0;
    line += kBlocks[std::isfinite(height) ? static_cast<int>(height) : 0];
  }
  return line;
}

std::string ShortDuration(absl::Duration duration) {
  const int64_t seconds = std::max<int64_t>(0, absl::ToInt64Seconds(duration));
  if (seconds < 60) return absl::StrCat(seconds, "s");
  if (seconds < 3600) return absl::StrFormat("%dm %02ds", seconds / 60, seconds % 60);
  return absl::StrFormat("%dh %02dm", seconds / 3600, seconds % 3600 / 60);
}

}  // namespace moerl
