#ifndef MOERL_SERVICES_TRAINER_METRICS_LOG_H_
#define MOERL_SERVICES_TRAINER_METRICS_LOG_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "libs/base/env.h"
#include "moerl/v1/trainer.pb.h"

namespace moerl::trainer {

// metrics.jsonl: one JSON object a step, the fields of StepMetrics under their names. Thread-compatible.
class MetricsLog {
 public:
  // Continues the file, without the rows of steps after `last_step`: a resumed run takes them again.
  static absl::StatusOr<std::unique_ptr<MetricsLog>> Open(const std::string& path, int64_t last_step);

  absl::Status Append(const v1::StepMetrics& row);
  const std::vector<v1::StepMetrics>& rows() const { return rows_; }

 private:
  MetricsLog() = default;
  std::unique_ptr<WritableFile> file_;
  std::vector<v1::StepMetrics> rows_;
};

// A message of numbers as one line of JSON; fields that are not set are left out only where they are `optional`.
std::string ToJsonLine(const google::protobuf::Message& message);

}  // namespace moerl::trainer

#endif  // MOERL_SERVICES_TRAINER_METRICS_LOG_H_
