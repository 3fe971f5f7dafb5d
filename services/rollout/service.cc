#include "services/rollout/service.h"

#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libs/base/status_macros.h"
#include "libs/rpc/server.h"
#include "libs/rpc/status.h"
#include "libs/rpc/stream.h"
#include "services/rollout/leased_group.h"
#include "services/rollout/request_check.h"

namespace moerl::rollout {
namespace {

constexpr absl::Duration kWeightsRetryDelay = absl::Seconds(1);

uint64_t RandomSeed() {
  thread_local std::mt19937_64 engine{std::random_device{}()};
  return engine();
}

model::Request ToModel(const v1::GenerateRequest& from) {
  model::Request request;
  request.prompt.assign(from.prompt_token_ids().begin(), from.prompt_token_ids().end());
  const uint32_t num_samples = from.has_num_samples() ? from.num_samples() : 1;
  for (uint32_t i = 0; i < num_samples; ++i) request.samples.push_back({i, {}});
  request.sampling = SamplingFromProto(from.sampling());
  request.run_seed = from.has_seed() ? from.seed() : RandomSeed();
  request.want_kept = from.with_kept_ids();
  request.want_routes = from.with_routes();
  request.want_prompt_logprobs = from.with_prompt_logprobs();
  return request;
}

void ToProto(VersionName version, v1::VersionName* to) {
  to->set_epoch(static_cast<uint64_t>(version.epoch));
  to->set_number(static_cast<uint64_t>(version.number));
}

}  // namespace

absl::Status Service::Admit(const Snapshot& snapshot) const {
  const rpc::Server* server = server_.load(std::memory_order_acquire);
  if (server == nullptr || !snapshot.has_weights) {
    return rpc::WithRetryDelay(absl::UnavailableError("no weights yet"), kWeightsRetryDelay);
  }
  return server->Admit();
}

absl::StatusOr<std::shared_ptr<GenerateCall>> Service::Accept(const v1::GenerateRequest& request, absl::Time deadline) {
  const Snapshot snapshot = scheduler_->snapshot();
  MOERL_RETURN_IF_ERROR(Admit(snapshot));
  MOERL_RETURN_IF_ERROR(CheckGenerateRequest(request, *snapshot.config));
  GenerateCall::Options options;
  MOERL_ASSIGN_OR_RETURN(options.waiting, scheduler_->TakeQueuePlace());
  options.request_id = request.request_id().empty() ? absl::StrCat("generate-", ++num_named_) : request.request_id();
  model::Request engine_request = ToModel(request);
  options.num_samples = static_cast<uint32_t>(engine_request.samples.size());
  options.num_prompt_tokens = request.prompt_token_ids_size();
  options.with_kept_ids = request.with_kept_ids();
  if (request.with_routes()) options.routes = RouteFormatOf(*snapshot.config);
  options.stop_token_ids = engine_request.sampling.stop_token_ids;
  const std::string id = options.request_id;
  auto call = std::make_shared<GenerateCall>(std::move(options), [this, id] { scheduler_->CancelCall(id); });
  scheduler_->AddCall(call, std::move(engine_request), deadline);
  return call;
}

grpc::ServerWriteReactor<v1::GenerateResponse>* Service::Generate(grpc::CallbackServerContext* context,
                                                                  const v1::GenerateRequest* request) {
  absl::StatusOr<std::shared_ptr<GenerateCall>> call = Accept(*request, absl::FromChrono(context->deadline()));
  if (!call.ok()) return rpc::Refuse<v1::GenerateResponse>(call.status());
  return rpc::Start(*std::move(call));
}

grpc::ServerUnaryReactor* Service::Abort(grpc::CallbackServerContext* context, const v1::AbortRequest* request,
                                         v1::AbortResponse* response) {
  if (request->request_id().empty())
    return rpc::Reply(context, rpc::InvalidField("request_id", "empty; expected 1 to 128 bytes"));
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  scheduler_->AbortCall(request->request_id(), [reactor, response](absl::StatusOr<uint32_t> num_samples) {
    if (num_samples.ok()) response->set_num_samples_aborted(*num_samples);
    reactor->Finish(rpc::ToGrpc(num_samples.status()));
  });
  return reactor;
}

grpc::ServerUnaryReactor* Service::Drain(grpc::CallbackServerContext* context, const v1::DrainRequest*,
                                         v1::DrainResponse* response) {
  if (rpc::Server* server = server_.load(std::memory_order_acquire)) server->BeginDrain();
  const Snapshot snapshot = scheduler_->snapshot();
  response->set_num_running(static_cast<uint32_t>(snapshot.load.running_samples + snapshot.load.waiting_samples));
  return rpc::Reply(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* Service::GetLoad(grpc::CallbackServerContext* context, const v1::GetLoadRequest*,
                                           v1::GetLoadResponse* response) {
  const Snapshot snapshot = scheduler_->snapshot();
  const rpc::Server* server = server_.load(std::memory_order_acquire);
  response->set_num_running(static_cast<uint32_t>(snapshot.load.running_samples));
  response->set_num_waiting(static_cast<uint32_t>(snapshot.load.waiting_samples));
  response->set_kv_pages_used(static_cast<uint64_t>(snapshot.load.pages_used));
  response->set_kv_pages_total(static_cast<uint64_t>(snapshot.load.pages_total));
  response->set_tokens_per_second(snapshot.tokens_per_second);
  response->set_is_draining(server != nullptr && server->is_draining());
  if (snapshot.has_weights) ToProto(snapshot.version, response->mutable_weight_version());
  return rpc::Reply(context, absl::OkStatus());
}

grpc::ServerUnaryReactor* Service::GetModelInfo(grpc::CallbackServerContext* context, const v1::GetModelInfoRequest*,
                                                v1::GetModelInfoResponse* response) {
  const Snapshot snapshot = scheduler_->snapshot();
  if (!snapshot.has_weights) {
    return rpc::Reply(context, rpc::WithRetryDelay(absl::UnavailableError("no weights yet"), kWeightsRetryDelay));
  }
  const model::ModelConfig& config = *snapshot.config;
  response->set_architecture(std::string(model::ArchitectureName(config.family)));
  response->set_vocab_size(static_cast<uint32_t>(config.vocab_size));
  response->set_context_length(static_cast<uint32_t>(config.max_position));
  response->set_num_parameters(static_cast<uint64_t>(config.num_parameters()));
  ToProto(snapshot.version, response->mutable_weight_version());
  response->set_numerics_fingerprint(snapshot.fingerprint);
  response->set_num_moe_layers(static_cast<uint32_t>(config.num_moe_layers()));
  response->set_num_experts_per_token(static_cast<uint32_t>(config.top_k));
  return rpc::Reply(context, absl::OkStatus());
}

}  // namespace moerl::rollout
