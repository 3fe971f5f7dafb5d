// moerl-trainer: one rank of the trainer.
#include "libs/rpc/program.h"
#include "moerl/v1/experience.grpc.pb.h"
#include "moerl/v1/trainer.grpc.pb.h"

int main(int argc, char** argv) {
  auto program = moerl::rpc::Program::Start(argc, argv, {.name = "moerl-trainer", .port = 7100, .metrics_port = 8100});
  moerl::v1::TrainerService::CallbackService trainer;
  moerl::v1::ExperienceService::CallbackService experience;
  program->Serve({&trainer, &experience}).SetReady(true);
  return program->Finish();
}
