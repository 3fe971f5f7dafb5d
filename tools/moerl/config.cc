// moerl config: reads a configuration as every program does and prints it with all defaults filled in.
#include "libs/base/config.h"

#include <cstdio>

#include "moerl/v1/config.pb.h"
#include "tools/moerl/commands.h"

namespace moerl {

int RunConfig(const Arguments& arguments) {
  Flags flags("config", arguments);
  if (flags.Switch("help")) {
    std::puts("usage: moerl config FILE [--set a.b=VALUE]…\nChecks FILE and prints it with every default written out.");
    return 0;
  }
  const std::vector<std::string> overrides = flags.Strings("set");
  if (absl::Status status = flags.Finish(1, 1); !status.ok()) return UsageError(status);
  v1::Config config;
  if (absl::Status status = LoadConfig(flags.positional()[0], overrides, config); !status.ok())
    return UsageError(status);
  std::fputs(FormatConfig(config).c_str(), stdout);
  return 0;
}

}  // namespace moerl
