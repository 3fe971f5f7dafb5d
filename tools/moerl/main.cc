// moerl: the command line. A subcommand is one file and one line of the table below.
#include <cstdio>
#include <cstring>

#include "libs/base/crash_signals.h"
#include "tools/moerl/command.h"
#include "tools/moerl/commands.h"

namespace {

constexpr moerl::Command kCommands[] = {
    {"config", "checks a configuration and prints it with its defaults", moerl::RunConfig},
    {"bench", "measures what this build reaches on this machine", moerl::RunBench},
    {"init", "makes a model directory with random weights from a config.json", moerl::RunInit},
    {"export", "writes a model directory again in another type or sharding", moerl::RunExport},
    {"upcycle", "makes an MoE from a dense model", moerl::RunUpcycle},
    {"logprobs", "prints log-probabilities of given token sequences", moerl::RunLogprobs},
    {"eval", "sampled pass rate of a model on held-out prompts", moerl::RunEval},
    {"generate", "samples continuations of given token ids", moerl::RunGenerate},
    {"run", "trains on this machine: starts all processes and watches over them", moerl::RunRun},
    {"doctor", "prints what this machine offers and lacks", moerl::RunDoctor},
    {"status", "asks a run how it is doing", moerl::RunStatus},
    {"top", "shows a run live", moerl::RunTop},
    {"weights", "lists the weight versions of a run", moerl::RunWeights},
};

int PrintHelp(std::FILE* to) {
  std::fprintf(to, "usage: moerl COMMAND [ARGUMENTS]; moerl COMMAND --help says more\n\n");
  for (const moerl::Command& command : kCommands) std::fprintf(to, "  %-10s %s\n", command.name, command.help);
  return to == stdout ? 0 : 2;
}

}  // namespace

int main(int argc, char** argv) {
  moerl::DropInfinipathHandlers();
  if (argc < 2) return PrintHelp(stderr);
  if (std::strcmp(argv[1], "--help") == 0 || std::strcmp(argv[1], "help") == 0) return PrintHelp(stdout);
  for (const moerl::Command& command : kCommands) {
    if (std::strcmp(argv[1], command.name) == 0) return command.run(moerl::Arguments(argv + 2, argv + argc));
  }
  std::fprintf(stderr, "moerl: unknown command \"%s\"\n", argv[1]);
  return PrintHelp(stderr);
}
