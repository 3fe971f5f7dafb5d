#ifndef MOERL_LIBS_BASE_METRICS_H_
#define MOERL_LIBS_BASE_METRICS_H_

#include <initializer_list>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace prometheus {
class Counter;
class Gauge;
class Histogram;
}  // namespace prometheus

// The metrics of this process: one registry, one HTTP port, Prometheus's text format. Thread-safe.
//
//   static Counter& tokens = GetCounter("moerl_rollout_tokens_total", "Tokens sampled.", {{"phase", "decode"}});
//   tokens.Add(n);
//
// Names are moerl_…, in base units with the unit last (_seconds, _bytes), and counters end in _total.
// A Get… takes a lock and a map look-up: keep the reference, it lives as long as the process. The first call
// for a name fixes its help and, for a histogram, its buckets. Labels must have few values, known ahead:
// never ids of samples, leases or peers without a bound. A name used for two kinds ends the program.
namespace moerl {

using MetricLabels = std::initializer_list<std::pair<absl::string_view, absl::string_view>>;

class Counter {
 public:
  explicit Counter(prometheus::Counter* counter) : counter_(counter) {}
  void Add(double by = 1);  // not negative
  double Value() const;

 private:
  prometheus::Counter* counter_;
};

class Gauge {
 public:
  explicit Gauge(prometheus::Gauge* gauge) : gauge_(gauge) {}
  void Set(double value);
  void Add(double by);
  double Value() const;

 private:
  prometheus::Gauge* gauge_;
};

class Histogram {
 public:
  explicit Histogram(prometheus::Histogram* histogram) : histogram_(histogram) {}
  void Observe(double value);

 private:
  prometheus::Histogram* histogram_;
};

Counter& GetCounter(absl::string_view name, absl::string_view help, MetricLabels labels = {});
Gauge& GetGauge(absl::string_view name, absl::string_view help, MetricLabels labels = {});

// `bounds` are the buckets' upper bounds, ascending; one above them all is added.
Histogram& GetHistogram(absl::string_view name, absl::string_view help, absl::Span<const double> bounds,
                        MetricLabels labels = {});

// Bounds for durations in seconds, from 100 µs to an hour, about three a decade.
absl::Span<const double> SecondsBounds();

// Serves GET /metrics on "host:port" for the rest of the process's life; port 0 takes a free one. Besides
// what was registered it reports process_*, the cgroup's limits and use of memory and CPU, pressure-stall
// time, shared memory and network bytes by interface, read at each scrape.
// Errors: FAILED_PRECONDITION at a second call; UNAVAILABLE naming the address when it cannot be had.
absl::Status ServeMetrics(const std::string& address);

// The port ServeMetrics serves on; 0 before.
int MetricsPort();

// What a scrape would read.
std::string RenderMetrics();

}  // namespace moerl

#endif  // MOERL_LIBS_BASE_METRICS_H_
