// Any bytes are a configuration that reads back as it was written, or an error of one line that names the file.
#include <google/protobuf/util/message_differencer.h>

#include <cstdint>

#include "absl/strings/match.h"
#include "libs/base/check.h"
#include "libs/base/config.h"
#include "moerl/v1/config.pb.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  moerl::v1::Config config;
  const absl::Status status = moerl::ParseConfig(text, "f.yaml", {}, config);
  if (!status.ok()) {
    MOERL_CHECK(absl::StartsWith(status.message(), "config: f.yaml"));
    MOERL_CHECK(!absl::StrContains(status.message(), '\n'));
    return 0;
  }
  moerl::v1::Config again;
  MOERL_CHECK(moerl::ParseConfig(moerl::FormatConfig(config), "f.yaml", {}, again).ok());
  MOERL_CHECK(google::protobuf::util::MessageDifferencer::Equals(config, again));
  return 0;
}
