#include "tools/moerl/panel.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

namespace moerl {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

RunView ViewInTheMiddle() {
  RunView view;
  view.name = "reverse";
  view.elapsed = absl::Seconds(75);
  v1::GetStatusResponse status;
  status.set_phase(v1::TRAINER_PHASE_WAITING);
  status.set_step(20);
  status.set_num_steps(80);
  status.mutable_weight_version()->set_number(20);
  status.set_waiting_for("3 samples of group 640");
  v1::WorkerStatus* worker = status.add_workers();
  worker->set_worker("rollout-0");
  worker->set_is_connected(true);
  worker->set_num_leases(4);
  view.status = status;
  for (int step = 1; step <= 20; ++step) {
    v1::StepMetrics row;
    row.set_step(step);
    row.set_reward_mean(step / 20.0);
    row.set_pass_rate(step / 40.0);
    row.set_step_seconds(2);
    row.set_tokens_per_second(12345);
    row.set_mismatch_tokens(20480);
    view.rows.push_back(row);
  }
  return view;
}

TEST(Panel, ShowsProgressLearningSpeedNumericsAndWhoWaits) {
  const std::vector<std::string> lines = RenderPanel(ViewInTheMiddle(), 90);
  ASSERT_EQ(lines.size(), 7u);
  EXPECT_THAT(lines[0], HasSubstr("moerl reverse  step 20/80"));
  EXPECT_THAT(lines[0], HasSubstr(" 25 %  2m 00s left"));
  EXPECT_THAT(lines[1], HasSubstr("reward      1.000  ▁▁▁▂"));
  EXPECT_THAT(lines[3], HasSubstr("12,345 tokens/s, step 2.00 s"));
  EXPECT_THAT(lines[4], HasSubstr("mismatch 0 over 20,480 tokens, staleness 0"));
  EXPECT_THAT(lines[5], HasSubstr("waiting, weights v20, checkpoint at 0; waits for 3 samples of group 640"));
  EXPECT_THAT(lines[6], HasSubstr("rollouts  rollout-0 v0, 4 leases"));
}

TEST(Panel, FitsTheTerminal) {
  RunView view = ViewInTheMiddle();
  view.notices = {std::string(500, 'x'), "short"};
  for (int width : {1, 40, 63, 120}) {
    for (const std::string& line : RenderPanel(view, width)) {
      const auto columns = std::count_if(line.begin(), line.end(), [](char c) { return (c & 0xc0) != 0x80; });
      EXPECT_LE(columns, std::max(width, 40)) << line;
    }
  }
}

TEST(Panel, ANoticeOfSeveralLinesTakesOne) {
  RunView view;
  view.name = "reverse";
  view.notices = {"trainer ended: Traceback\n\tValueError"};
  EXPECT_THAT(RenderPanel(view, 80),
              ElementsAre("moerl reverse  starting, 0s", "events    trainer ended: Traceback  ValueError"));
}

TEST(Panel, BeforeTheTrainerAnswersSaysThatItStarts) {
  RunView view;
  view.name = "reverse";
  view.elapsed = absl::Seconds(3);
  EXPECT_THAT(RenderPanel(view, 80), ElementsAre("moerl reverse  starting, 3s"));
}

TEST(Panel, ShowsTheWarmStart) {
  RunView view;
  view.name = "reverse";
  view.status.emplace();
  view.status->set_phase(v1::TRAINER_PHASE_WARM_START);
  view.status->set_warm_start_step(35);
  view.status->set_warm_start_pass_rate(0.0625);
  EXPECT_THAT(RenderPanel(view, 80)[0], HasSubstr("warm start, step 35, pass rate 0.06"));
}

TEST(Panel, SparklinesSpanTheirRangeAndKeepTheLatest) {
  const std::vector<double> rising = {0, 1, 2, 3, 4, 5, 6, 7};
  EXPECT_EQ(Sparkline(rising, 8), "▁▂▃▄▅▆▇█");
  EXPECT_EQ(Sparkline(rising, 2), "▁█");
  EXPECT_EQ(Sparkline({5.0, 5.0}, 8), "▁▁");
  EXPECT_EQ(Sparkline({}, 8), "");
  EXPECT_EQ(Sparkline({1.0, std::numeric_limits<double>::quiet_NaN()}, 8).size(), 6u);
}

TEST(Panel, DurationsAreShort) {
  EXPECT_EQ(ShortDuration(absl::Seconds(42.9)), "42s");
  EXPECT_EQ(ShortDuration(absl::Seconds(185)), "3m 05s");
  EXPECT_EQ(ShortDuration(absl::Minutes(130)), "2h 10m");
}

TEST(Panel, ARowIsOneLine) {
  v1::StepMetrics row;
  row.set_step(3);
  row.set_reward_mean(0.5);
  row.set_eval_pass_rate(0.75);
  EXPECT_EQ(RenderRow(row, 80),
            "step 3/80  reward 0.500  pass rate 0.000  mismatch 0 over 0 tokens  weights v0  0.00 s  0 tokens/s"
            "  held-out pass rate 0.750");
}

}  // namespace
}  // namespace moerl
