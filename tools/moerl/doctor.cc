// moerl doctor: prints what this machine offers and what it lacks.
#include <cstdio>

#include "tools/moerl/commands.h"
#include "tools/moerl/machine_facts.h"

namespace moerl {

int RunDoctor(const Arguments& arguments) {
  Flags flags("doctor", arguments);
  if (flags.Switch("help")) {
    std::puts("usage: moerl doctor [--json]\nPrints what this machine offers, and what to do about what it lacks.");
    return 0;
  }
  const bool is_json = flags.Switch("json");
  if (absl::Status status = flags.Finish(0, 0); !status.ok()) return UsageError(status);
  const MachineFacts facts = ReadMachineFacts();
  const std::vector<Shortfall> shortfalls = FindShortfalls(facts);
  std::fputs((is_json ? FactsJson(facts, shortfalls) : FactsTable(facts, shortfalls)).c_str(), stdout);
  return 0;
}

}  // namespace moerl
