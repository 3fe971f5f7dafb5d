// moerl-environment: serves the built-in tasks.
#include "libs/rpc/program.h"
#include "moerl/v1/environment.grpc.pb.h"

int main(int argc, char** argv) {
  auto program =
      moerl::rpc::Program::Start(argc, argv, {.name = "moerl-environment", .port = 7300, .metrics_port = 8300});
  moerl::v1::EnvironmentService::CallbackService service;
  program->Serve({&service}).SetReady(true);
  return program->Finish();
}
