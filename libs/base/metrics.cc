#include "libs/base/metrics.h"

#include <prometheus/collectable.h>
#include <prometheus/counter.h>
#include <prometheus/exposer.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <array>
#include <exception>
#include <map>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "libs/base/check.h"
#include "libs/base/machine.h"

namespace moerl {
namespace {

// One slow scraper must not keep the others out.
constexpr size_t kScraperThreads = 2;

prometheus::MetricType TypeOf(Reading::Kind kind) {
  return kind == Reading::Kind::kCounter ? prometheus::MetricType::Counter : prometheus::MetricType::Gauge;
}

class MachineCollector final : public prometheus::Collectable {
 public:
  std::vector<prometheus::MetricFamily> Collect() const override {
    std::vector<prometheus::MetricFamily> families;
    for (const Reading& reading : ReadMachine()) {
      if (families.empty() || families.back().name != reading.name) {
        families.push_back({reading.name, reading.help, TypeOf(reading.kind), {}});
      }
      families.back().metric.push_back(MetricOf(reading));
    }
    return families;
  }

 private:
  static prometheus::ClientMetric MetricOf(const Reading& reading) {
    prometheus::ClientMetric metric;
    for (const auto& [key, value] : reading.labels) metric.label.push_back({key, value});
    if (reading.kind == Reading::Kind::kCounter) {
      metric.counter.value = reading.value;
    } else {
      metric.gauge.value = reading.value;
    }
    return metric;
  }
};

// Everything registered. Lives until the process ends: references to metrics do, and ~Exposer can
// block for two seconds.
struct Metrics {
  absl::Mutex mutex;
  const std::shared_ptr<prometheus::Registry> registry =
      std::make_shared<prometheus::Registry>(prometheus::Registry::InsertBehavior::Merge);
  const std::shared_ptr<MachineCollector> machine = std::make_shared<MachineCollector>();
  std::map<std::string, const char*> kinds ABSL_GUARDED_BY(mutex);
  std::map<std::string, std::string> helps ABSL_GUARDED_BY(mutex);
  std::map<std::string, std::vector<double>> bounds ABSL_GUARDED_BY(mutex);
  // By name and labels.
  std::map<std::pair<std::string, prometheus::Labels>, Counter> counters ABSL_GUARDED_BY(mutex);
  std::map<std::pair<std::string, prometheus::Labels>, Gauge> gauges ABSL_GUARDED_BY(mutex);
  std::map<std::pair<std::string, prometheus::Labels>, Histogram> histograms ABSL_GUARDED_BY(mutex);
  prometheus::Exposer* exposer ABSL_GUARDED_BY(mutex) = nullptr;
};

Metrics& Get() {
  static Metrics* metrics = new Metrics;
  return *metrics;
}

prometheus::Labels ToLabels(MetricLabels labels) {
  prometheus::Labels out;
  for (const auto& [key, value] : labels) out.emplace(std::string(key), std::string(value));
  return out;
}

// The metric of `name` and `labels` in `known`, made by `make(family name, help, labels)` the first time.
template <typename Metric, typename Make>
Metric& FindOrMake(const char* kind, std::map<std::pair<std::string, prometheus::Labels>, Metric>& known,
                   absl::string_view name, absl::string_view help, MetricLabels labels, Make make)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(Get().mutex) {
  const std::pair<std::string, prometheus::Labels> key(std::string(name), ToLabels(labels));
  if (const auto it = known.find(key); it != known.end()) return it->second;
  const bool is_one_kind = Get().kinds.try_emplace(key.first, kind).first->second == absl::string_view(kind);
  MOERL_CHECK(is_one_kind);
  const std::string& first_help = Get().helps.try_emplace(key.first, help).first->second;
  return known.emplace(key, Metric(make(key.first, first_help, key.second))).first->second;
}

}  // namespace

void Counter::Add(double by) { counter_->Increment(by); }
double Counter::Value() const { return counter_->Value(); }
void Gauge::Set(double value) { gauge_->Set(value); }
void Gauge::Add(double by) { gauge_->Increment(by); }
double Gauge::Value() const { return gauge_->Value(); }
void Histogram::Observe(double value) { histogram_->Observe(value); }

Counter& GetCounter(absl::string_view name, absl::string_view help, MetricLabels labels) {
  Metrics& metrics = Get();
  absl::MutexLock lock(&metrics.mutex);
  return FindOrMake("counter", metrics.counters, name, help, labels, [&](auto& n, auto& h, auto& l) {
    return &prometheus::BuildCounter().Name(n).Help(h).Register(*metrics.registry).Add(l);
  });
}

Gauge& GetGauge(absl::string_view name, absl::string_view help, MetricLabels labels) {
  Metrics& metrics = Get();
  absl::MutexLock lock(&metrics.mutex);
  return FindOrMake("gauge", metrics.gauges, name, help, labels, [&](auto& n, auto& h, auto& l) {
    return &prometheus::BuildGauge().Name(n).Help(h).Register(*metrics.registry).Add(l);
  });
}

Histogram& GetHistogram(absl::string_view name, absl::string_view help, absl::Span<const double> bounds,
                        MetricLabels labels) {
  Metrics& metrics = Get();
  absl::MutexLock lock(&metrics.mutex);
  return FindOrMake("histogram", metrics.histograms, name, help, labels, [&](auto& n, auto& h, auto& l) {
    const std::vector<double>& first_bounds =
        metrics.bounds.try_emplace(n, std::vector<double>(bounds.begin(), bounds.end())).first->second;
    return &prometheus::BuildHistogram().Name(n).Help(h).Register(*metrics.registry).Add(l, first_bounds);
  });
}

absl::Span<const double> SecondsBounds() {
  static constexpr std::array<double, 23> kBounds = {1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025,
                                                     0.05, 0.1,    0.25, 0.5,  1,      2.5,  5,    10,
                                                     25,   50,     100,  250,  500,    1000, 3600};
  return kBounds;
}

absl::Status ServeMetrics(const std::string& address) {
  Metrics& metrics = Get();
  absl::MutexLock lock(&metrics.mutex);
  if (metrics.exposer != nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("metrics: asked to serve on ", address, ", but serving already"));
  }
  try {
    metrics.exposer = new prometheus::Exposer(address, kScraperThreads);
  } catch (const std::exception& error) {
    return absl::UnavailableError(absl::StrCat("metrics: cannot listen on ", address, ": ", error.what(),
                                               "; is the port taken? set server.metrics_address"));
  }
  metrics.exposer->RegisterCollectable(metrics.registry);
  metrics.exposer->RegisterCollectable(metrics.machine);
  return absl::OkStatus();
}

int MetricsPort() {
  Metrics& metrics = Get();
  absl::MutexLock lock(&metrics.mutex);
  return metrics.exposer == nullptr ? 0 : metrics.exposer->GetListeningPorts().at(0);
}

std::string RenderMetrics() {
  std::vector<prometheus::MetricFamily> families = Get().registry->Collect();
  for (prometheus::MetricFamily& family : Get().machine->Collect()) families.push_back(std::move(family));
  return prometheus::TextSerializer().Serialize(families);
}

}  // namespace moerl
