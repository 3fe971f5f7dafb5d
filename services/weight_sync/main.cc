// moerl-weight-sync: stores and distributes weight versions.
#include "libs/rpc/program.h"
#include "moerl/v1/weight_sync.grpc.pb.h"

int main(int argc, char** argv) {
  auto program =
      moerl::rpc::Program::Start(argc, argv, {.name = "moerl-weight-sync", .port = 7200, .metrics_port = 8200});
  moerl::v1::WeightSyncService::CallbackService service;
  program->Serve({&service}).SetReady(true);
  return program->Finish();
}
