#ifndef MOERL_LIBS_BASE_MEASUREMENT_H_
#define MOERL_LIBS_BASE_MEASUREMENT_H_

#include <optional>
#include <string>

namespace moerl {

// One line of a benchmark. `reference` names the peer or physical limit measured in the same run, `ratio` is the value
// over the reference's, `goal` is for the ratio, or for the value where there is no ratio.
struct Measurement {
  std::string name;
  double value = 0;
  std::string unit;
  std::string reference;  // empty: none
  std::optional<double> ratio;
  std::optional<double> goal;
  bool higher_is_better = true;
};

// {"name":…,"value":…,"unit":…,"reference":…,"ratio":…,"goal":…,"better":"higher"|"lower"}, null where absent.
std::string ToJsonLine(const Measurement& measurement);

}  // namespace moerl

#endif  // MOERL_LIBS_BASE_MEASUREMENT_H_
