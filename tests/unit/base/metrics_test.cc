#include "libs/base/metrics.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "libs/base/env.h"

namespace moerl {
namespace {

using testing::HasSubstr;

std::string Get(int port, const std::string& path) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  const std::string request = absl::StrCat("GET ", path, " HTTP/1.0\r\n\r\n");
  EXPECT_EQ(send(fd, request.data(), request.size(), 0), static_cast<ssize_t>(request.size()));
  std::string answer;
  char buffer[4096];
  for (ssize_t got; (got = recv(fd, buffer, sizeof(buffer), 0)) > 0;) answer.append(buffer, got);
  close(fd);
  return answer;
}

TEST(Metrics, TheSameNameAndLabelsAreTheSameMetric) {
  Counter& counter = GetCounter("moerl_test_things_total", "Things.", {{"kind", "a"}, {"side", "left"}});
  counter.Add();
  GetCounter("moerl_test_things_total", "Other words.", {{"side", "left"}, {"kind", "a"}}).Add(2);
  GetCounter("moerl_test_things_total", "Things.", {{"kind", "b"}, {"side", "left"}}).Add(5);
  EXPECT_EQ(counter.Value(), 3);
  const std::string text = RenderMetrics();
  EXPECT_THAT(text, HasSubstr("# HELP moerl_test_things_total Things.\n# TYPE moerl_test_things_total counter\n"));
  EXPECT_THAT(text, HasSubstr("moerl_test_things_total{kind=\"a\",side=\"left\"} 3\n"));
  EXPECT_THAT(text, HasSubstr("moerl_test_things_total{kind=\"b\",side=\"left\"} 5\n"));
}

TEST(Metrics, GaugesGoBothWays) {
  Gauge& gauge = GetGauge("moerl_test_level", "Level.");
  gauge.Set(4);
  gauge.Add(-1.5);
  EXPECT_EQ(gauge.Value(), 2.5);
}

TEST(Metrics, HistogramsCountByBucket) {
  Histogram& histogram = GetHistogram("moerl_test_wait_seconds", "Wait.", SecondsBounds());
  histogram.Observe(0.2);
  histogram.Observe(10'000);
  const std::string text = RenderMetrics();
  EXPECT_THAT(text, HasSubstr("moerl_test_wait_seconds_bucket{le=\"0.1\"} 0\n"));
  EXPECT_THAT(text, HasSubstr("moerl_test_wait_seconds_bucket{le=\"0.25\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("moerl_test_wait_seconds_bucket{le=\"+Inf\"} 2\n"));
}

TEST(MetricsDeathTest, ANameOfTwoKindsEndsTheProgram) {
  GetCounter("moerl_test_twice_total", "Twice.");
  EXPECT_DEATH(GetGauge("moerl_test_twice_total", "Twice."), "is_one_kind");
}

TEST(Metrics, AreServedOverHttpInAFormThatPromtoolAccepts) {
  GetCounter("moerl_test_scraped_total", "Scraped.").Add(7);
  GetHistogram("moerl_test_scrape_seconds", "Scrape.", SecondsBounds()).Observe(1);
  ASSERT_TRUE(ServeMetrics("127.0.0.1:0").ok());
  EXPECT_EQ(ServeMetrics("127.0.0.1:0").code(), absl::StatusCode::kFailedPrecondition);
  const std::string answer = Get(MetricsPort(), "/metrics");
  EXPECT_THAT(answer, HasSubstr("200 OK"));
  EXPECT_THAT(answer, HasSubstr("moerl_test_scraped_total 7\n"));
  EXPECT_THAT(answer, HasSubstr("process_resident_memory_bytes "));
  EXPECT_THAT(answer, HasSubstr("moerl_network_receive_bytes_total{interface=\"lo\"}"));
  EXPECT_THAT(Get(MetricsPort(), "/"), HasSubstr("404"));

  if (std::system("command -v promtool >/dev/null") != 0) GTEST_SKIP() << "promtool is not installed";
  const std::string file = absl::StrCat(testing::TempDir(), "/metrics_test.", getpid());
  ASSERT_TRUE(PosixEnv()->WriteFileDurably(file, answer.substr(answer.find("\r\n\r\n") + 4)).ok());
  EXPECT_EQ(std::system(absl::StrCat("promtool check metrics <", file, " >&2").c_str()), 0);
  EXPECT_TRUE(PosixEnv()->Remove(file).ok());
}

}  // namespace
}  // namespace moerl
