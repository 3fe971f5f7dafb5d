// moerl-environment: serves the built-in tasks as an EnvironmentService.
#include "libs/environment/environment_service.h"
#include "libs/environment/task.h"
#include "libs/rpc/program.h"

int main(int argc, char** argv) {
  auto program =
      moerl::rpc::Program::Start(argc, argv, {.name = "moerl-environment", .port = 7300, .metrics_port = 8300});
  moerl::v1::Config config = program->config();
  config.mutable_environment()->clear_address();  // this program is what serves there
  const auto environment = moerl::MakeEnvironment(config, program->channel_options());
  if (!environment.ok()) moerl::rpc::ExitUnstarted("cannot serve the task", environment.status());
  const auto service = moerl::MakeEnvironmentService(*environment);
  program->Serve({service.get()}).SetReady(true);
  return program->Finish();
}
