#include "libs/rpc/program.h"

#include <gtest/gtest.h>

#include "absl/time/clock.h"
#include "libs/base/env.h"

namespace moerl::rpc {
namespace {

// A program that serves on free ports, with 100 ms to drain.
class ProgramDeathTest : public testing::Test {
 protected:
  void SetUp() override {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    ASSERT_TRUE(PosixEnv()
                    ->WriteFileDurably(path_,
                                       "name: test\ntask: {name: reverse}\nmodel: {init: {hidden_size: 32}}\n"
                                       "server: {listen_address: \"127.0.0.1:0\", metrics_address: \"127.0.0.1:0\", "
                                       "drain_grace_ms: 100}\n")
                    .ok());
  }
  void TearDown() override { EXPECT_TRUE(PosixEnv()->Remove(path_).ok()); }

  std::unique_ptr<Program> Start(std::vector<std::string> overrides = {}) {
    std::vector<std::string> arguments = {"test", "--config", path_};
    for (const std::string& override : overrides) {
      arguments.push_back("--set");
      arguments.push_back(override);
    }
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    return Program::Start(static_cast<int>(argv.size()), argv.data(), {.name = "test"});
  }

  [[noreturn]] void StopAndDrain(int exit_code, absl::Duration drain) {
    const std::unique_ptr<Program> program = Start();
    program->Serve({});
    program->RequestStop(exit_code);
    std::_Exit(program->Finish([drain](absl::Time) { absl::SleepFor(drain); }));
  }

  const std::string path_ = testing::TempDir() + "/program_test.yaml";  // of this process and of those that die
};

TEST_F(ProgramDeathTest, ReturnsTheCodeItWasAskedToStopWith) {
  EXPECT_EXIT(StopAndDrain(75, absl::ZeroDuration()), testing::ExitedWithCode(75), "stopped");
}

TEST_F(ProgramDeathTest, EndsADrainThatHangsThoughNoSignalCame) {
  EXPECT_EXIT(StopAndDrain(75, absl::Minutes(5)), testing::ExitedWithCode(75), "the drain did not end in time");
  EXPECT_EXIT(StopAndDrain(0, absl::Minutes(5)), testing::ExitedWithCode(1), "the drain did not end in time");
}

TEST_F(ProgramDeathTest, EndsWithTwoWhereItsConfigurationNamesAnAddressThatIsNone) {
  EXPECT_EXIT(Start({"server.listen_address=127.0.0.1:many"})->Serve({}), testing::ExitedWithCode(2),
              "expected host:port");
}

}  // namespace
}  // namespace moerl::rpc
