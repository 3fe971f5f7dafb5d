// moerl generate: samples continuations of a prompt of token ids, here or on a rollout server, one JSON line each.
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "libs/base/status_macros.h"
#include "libs/model/generator.h"
#include "libs/rpc/channel.h"
#include "libs/rpc/status.h"
#include "moerl/v1/environment.grpc.pb.h"
#include "moerl/v1/rollout.grpc.pb.h"
#include "moerl/v1/trainer.grpc.pb.h"
#include "moerl/v1/weight_sync.grpc.pb.h"
#include "tools/moerl/commands.h"

namespace moerl {
namespace {

constexpr absl::Duration kCallTimeout = absl::Hours(1);
constexpr absl::Duration kAskTimeout = absl::Seconds(10);
// Where nothing is asked for and the context has room for it.
constexpr int64_t kNewTokensByDefault = 64;

struct GenerateOptions {
  std::string model;
  std::string address;  // of a rollout server, instead of a model
  model::Compute compute = model::Compute::kBf16;
  int threads = 1;
  bool is_length_given = false;  // otherwise max_new_tokens is what fits, at most kNewTokensByDefault
  model::Request request;
};

absl::StatusOr<std::vector<int32_t>> ParseIds(absl::string_view option, absl::string_view text) {
  std::vector<int32_t> ids;
  for (const absl::string_view part : absl::StrSplit(text, ',', absl::SkipWhitespace())) {
    int32_t id;
    if (!absl::SimpleAtoi(part, &id)) {
      return absl::InvalidArgumentError(absl::StrCat("--", option, ": expected ids like 1,2,3, found \"", part, "\""));
    }
    ids.push_back(id);
  }
  return ids;
}

struct Sample {
  std::vector<int32_t> tokens;
  std::vector<double> logprobs;  // a float's value, so that JSON gives it back exactly
  model::FinishReason finish = model::FinishReason::kNone;
};
using Samples = std::map<uint32_t, Sample>;

const char* FinishName(model::FinishReason finish) {
  return finish == model::FinishReason::kStop ? "stop" : finish == model::FinishReason::kLength ? "length" : "abort";
}

// The request with its max_new_tokens settled for a model of this context.
absl::StatusOr<model::Request> FitToContext(const GenerateOptions& options, int64_t context) {
  model::Request request = options.request;
  const auto prompt = static_cast<int64_t>(request.prompt.size());
  const int64_t room = context - prompt;
  if (room < 1) {
    return absl::InvalidArgumentError(absl::StrCat("--tokens: expected at most ", context - 1,
                                                   " ids, the model's context of ", context, " less a new one, found ",
                                                   prompt));
  }
  int64_t& max_new_tokens = request.sampling.max_new_tokens;
  if (!options.is_length_given) max_new_tokens = std::min(max_new_tokens, room);
  if (max_new_tokens > room) {
    return absl::InvalidArgumentError(absl::StrCat("--max-new-tokens: expected 1 to ", room, ", what a prompt of ",
                                                   prompt, " leaves of the model's context of ", context, ", found ",
                                                   max_new_tokens));
  }
  return request;
}

absl::StatusOr<Samples> SampleHere(const GenerateOptions& options) {
  model::WeightsOptions weights_options;
  weights_options.compute = options.compute;
  MOERL_ASSIGN_OR_RETURN(const auto weights, model::Weights::Load(options.model, weights_options));
  MOERL_ASSIGN_OR_RETURN(const model::Request request, FitToContext(options, weights->config().max_position));
  const int64_t samples = static_cast<int64_t>(request.samples.size());
  model::GeneratorOptions generator_options;
  generator_options.num_threads = options.threads;
  generator_options.running_samples_max = samples;
  generator_options.step_tokens_max = std::max<int64_t>(samples, 2048);
  const int64_t positions = static_cast<int64_t>(request.prompt.size()) + request.sampling.max_new_tokens;
  generator_options.num_pages = samples * (positions / model::kPagePositions + 2);
  MOERL_ASSIGN_OR_RETURN(const auto generator, model::Generator::Create(weights, {0, 0}, generator_options));
  MOERL_RETURN_IF_ERROR(generator->Add(request));
  Samples all;
  while (!generator->idle()) {
    MOERL_ASSIGN_OR_RETURN(const model::StepOutput output, generator->Step());
    for (const model::SampleOutput& s : output.samples) {
      Sample& sample = all[s.sample_index];
      sample.tokens.insert(sample.tokens.end(), s.tokens.begin(), s.tokens.end());
      sample.logprobs.insert(sample.logprobs.end(), s.logprobs.begin(), s.logprobs.end());
      sample.finish = s.finish;
    }
  }
  return all;
}

v1::GenerateRequest ToProto(const model::Request& from) {
  v1::GenerateRequest request;
  request.mutable_prompt_token_ids()->Add(from.prompt.begin(), from.prompt.end());
  request.set_num_samples(static_cast<uint32_t>(from.samples.size()));
  request.set_seed(from.run_seed);
  v1::SamplingParams& sampling = *request.mutable_sampling();
  sampling.set_temperature(from.sampling.temperature);
  sampling.set_top_k(static_cast<uint32_t>(from.sampling.top_k));
  sampling.set_top_p(from.sampling.top_p);
  sampling.set_min_p(from.sampling.min_p);
  sampling.set_max_new_tokens(static_cast<uint32_t>(from.sampling.max_new_tokens));
  sampling.mutable_stop_token_ids()->Add(from.sampling.stop_token_ids.begin(), from.sampling.stop_token_ids.end());
  return request;
}

std::unique_ptr<grpc::ClientContext> Call(absl::Duration timeout) {
  std::unique_ptr<grpc::ClientContext> context = rpc::CallContext(timeout);
  context->set_wait_for_ready(false);
  return context;
}

// Who serves there, of those that one takes for a rollout server: all addresses stand together in endpoints.json.
// Nothing it asks changes anything: a step of no episode is refused.
std::string NameServer(const std::shared_ptr<grpc::Channel>& channel) {
  const auto is_served = [](const grpc::Status& status) { return status.error_code() != grpc::UNIMPLEMENTED; };
  v1::GetStatusResponse trainer;
  v1::ListVersionsResponse versions;
  v1::StepResponse step;
  if (is_served(v1::TrainerService::NewStub(channel)->GetStatus(Call(kAskTimeout).get(), {}, &trainer))) {
    return "a trainer";
  }
  if (is_served(v1::WeightSyncService::NewStub(channel)->ListVersions(Call(kAskTimeout).get(), {}, &versions))) {
    return "weight_sync";
  }
  if (is_served(v1::EnvironmentService::NewStub(channel)->Step(Call(kAskTimeout).get(), {}, &step))) {
    return "an environment";
  }
  return "a server without moerl.v1.RolloutService";
}

absl::StatusOr<v1::GetModelInfoResponse> AskModel(const std::shared_ptr<grpc::Channel>& channel,
                                                  const std::string& address) {
  v1::GetModelInfoResponse info;
  const grpc::Status status = v1::RolloutService::NewStub(channel)->GetModelInfo(Call(kAskTimeout).get(), {}, &info);
  if (status.error_code() == grpc::UNIMPLEMENTED) {
    return absl::FailedPreconditionError(absl::StrCat("generate: expected a rollout server at ", address, ", found ",
                                                      NameServer(channel),
                                                      "; the addresses of a run are in its endpoints.json"));
  }
  if (!status.ok()) return rpc::FromGrpc(status, absl::StrCat("generate: the rollout server at ", address));
  return info;
}

absl::StatusOr<Samples> SampleAt(const GenerateOptions& options) {
  MOERL_ASSIGN_OR_RETURN(const auto channel, rpc::MakeChannel(options.address, {}));
  MOERL_ASSIGN_OR_RETURN(const v1::GetModelInfoResponse info, AskModel(channel, options.address));
  MOERL_ASSIGN_OR_RETURN(const model::Request request, FitToContext(options, info.context_length()));
  const auto stub = v1::RolloutService::NewStub(channel);
  const std::unique_ptr<grpc::ClientContext> context = Call(kCallTimeout);
  const auto stream = stub->Generate(context.get(), ToProto(request));
  Samples all;
  v1::GenerateResponse response;
  while (stream->Read(&response)) {
    Sample& sample = all[response.sample_index()];
    const v1::TokenSpan& tokens = response.chunk().tokens();
    sample.tokens.insert(sample.tokens.end(), tokens.token_ids().begin(), tokens.token_ids().end());
    sample.logprobs.insert(sample.logprobs.end(), tokens.logprobs().begin(), tokens.logprobs().end());
    if (!response.has_complete()) continue;
    // The library's enum has the wire's order and starts with kNone.
    sample.finish = static_cast<model::FinishReason>(response.complete().finish_reason());
  }
  const grpc::Status status = stream->Finish();
  if (!status.ok()) return rpc::FromGrpc(status, absl::StrCat("generate: the rollout server at ", options.address));
  return all;
}

void PrintSamples(const Samples& samples) {
  for (const auto& [index, sample] : samples) {
    nlohmann::ordered_json line;
    line["sample"] = index;
    line["tokens"] = sample.tokens;
    line["logprobs"] = sample.logprobs;
    line["finish"] = FinishName(sample.finish);
    std::puts(line.dump().c_str());
  }
}

}  // namespace

int RunGenerate(const Arguments& arguments) {
  Flags flags("generate", arguments);
  if (flags.Switch("help")) {
    std::puts(
        "usage: moerl generate --model DIR|--address HOST:PORT --tokens 1,2,3 [--n N] [--max-new-tokens N]\n"
        "       [--temperature T] [--top-k K] [--top-p P] [--min-p P] [--stop 0,1] [--seed N]\n"
        "       [--compute bf16|fp32] [--threads N]\n"
        "N new tokens at most: by default 64, or what the prompt leaves of the model's context where that is less.\n"
        "Samples from a model directory, or on the rollout server at the address (those of a run are in its\n"
        "endpoints.json). Prints a line {\"sample\",\"tokens\",\"logprobs\",\"finish\"} for each of N samples; the "
        "same\n"
        "weights and seed give the same line here and there.");
    return 0;
  }
  GenerateOptions options;
  options.model = flags.String("model", "");
  options.address = flags.String("address", "");
  const auto compute = model::ParseCompute(flags.String("compute", "bf16"));
  options.threads = static_cast<int>(flags.Integer("threads", 1, 1, 1024));
  const auto prompt = ParseIds("tokens", flags.String("tokens", ""));
  const auto stop = ParseIds("stop", flags.String("stop", ""));
  const int64_t n = flags.Integer("n", 1, 1, model::kSamplesPerRequestMax);
  model::SamplingParams& sampling = options.request.sampling;
  const int64_t max_new_tokens = flags.Integer("max-new-tokens", 0, 1, INT32_MAX);
  options.is_length_given = max_new_tokens > 0;
  sampling.max_new_tokens = options.is_length_given ? max_new_tokens : kNewTokensByDefault;
  sampling.temperature = static_cast<float>(flags.Real("temperature", 1.0, 0, 1e6));
  sampling.top_k = flags.Integer("top-k", 0, 0, INT32_MAX);
  sampling.top_p = static_cast<float>(flags.Real("top-p", 1.0, 0, 1));
  sampling.min_p = static_cast<float>(flags.Real("min-p", 0.0, 0, 1));
  options.request.run_seed = static_cast<uint64_t>(flags.Integer("seed", 0, 0, INT64_MAX));
  if (absl::Status s = flags.Finish(0, 0); !s.ok()) return UsageError(s);
  for (const absl::Status& s : {compute.status(), prompt.status(), stop.status()}) {
    if (!s.ok()) return UsageError(s);
  }
  if (options.model.empty() == options.address.empty()) {
    return UsageError(absl::InvalidArgumentError("one of --model DIR and --address HOST:PORT is required"));
  }
  options.compute = *compute;
  options.request.prompt = *prompt;
  sampling.stop_token_ids = *stop;
  for (int64_t i = 0; i < n; ++i) options.request.samples.push_back({static_cast<uint32_t>(i), {}});
  const absl::StatusOr<Samples> samples = options.address.empty() ? SampleHere(options) : SampleAt(options);
  if (!samples.ok()) return Failure(samples.status());
  PrintSamples(*samples);
  return 0;
}

}  // namespace moerl
