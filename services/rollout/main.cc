// moerl-rollout: samples completions, for callers and for the trainer.
#include "libs/rpc/program.h"
#include "moerl/v1/rollout.grpc.pb.h"

int main(int argc, char** argv) {
  auto program = moerl::rpc::Program::Start(argc, argv, {.name = "moerl-rollout", .port = 7400, .metrics_port = 8400});
  moerl::v1::RolloutService::CallbackService service;
  program->Serve({&service}).SetReady(true);
  return program->Finish();
}
