#include "libs/model/model_bench.h"

#include <algorithm>
#include <cmath>
#include <ctime>
#include <map>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "libs/base/status_macros.h"
#include "libs/model/generator.h"
#include "libs/model/training.h"
#include "libs/tensor/kernel_bench.h"

namespace moerl::model {
namespace {

// What this machine can do on one thread, by the kernel benchmark's names.
struct Limits {
  double peak_flops_bf16 = 0, peak_flops_fp32 = 0, bytes_per_s = 0;
};

absl::StatusOr<Limits> MeasureLimits(int num_threads) {
  MOERL_ASSIGN_OR_RETURN(const std::vector<Measurement> lines, tensor::MeasureKernels(2.0));
  std::map<std::string, double> values;
  for (const Measurement& line : lines) values[line.name] = line.value * 1e9;
  Limits limits{values["peak_bf16"] * num_threads, values["peak_fp32"] * num_threads, values["read_bandwidth"]};
  if (!(limits.peak_flops_bf16 > 0 && limits.peak_flops_fp32 > 0 && limits.bytes_per_s > 0)) {
    return absl::InternalError("model bench: the kernel benchmark gave no limits");
  }
  return limits;
}

// One thread is measured by its own time, so that other processes' turns do not count; several by the wall's.
double Seconds(int num_threads) {
  timespec now;
  clock_gettime(num_threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Multiply-adds of one token's forward pass through the layers and the head, attention over `context` keys included.
double ForwardFlops(const ModelConfig& c, double context) {
  const double h = static_cast<double>(c.hidden_size);
  const double attention =
      h * static_cast<double>(2 * c.q_size() + 2 * c.kv_size()) + 2 * context * static_cast<double>(c.q_size());
  const double experts =
      3 * h * static_cast<double>(c.moe_intermediate_size * c.top_k) + h * static_cast<double>(c.num_experts);
  return 2 * (static_cast<double>(c.num_layers) * (attention + experts) + h * static_cast<double>(c.vocab_size));
}

// Bytes of weights that a decode step of n sequences reads: everything but the experts once, and each expert that
// someone chose, were choices uniform.
double StepBytes(const ModelConfig& c, double n, double element) {
  const double h = static_cast<double>(c.hidden_size), experts = static_cast<double>(c.num_experts);
  const double chosen = experts * (1 - std::pow(1 - static_cast<double>(c.top_k) / experts, n));
  const double attention = h * static_cast<double>(2 * c.q_size() + 2 * c.kv_size());
  const double layer = attention + h * experts + chosen * 3 * h * static_cast<double>(c.moe_intermediate_size);
  return element * (static_cast<double>(c.num_layers) * layer + h * static_cast<double>(c.vocab_size));
}

absl::StatusOr<double> TrainTokensPerSecond(const TensorSet& parameters, Compute compute,
                                            const ModelBenchOptions& options) {
  const ModelConfig config = BenchConfig();
  TrainerModelOptions trainer_options;
  trainer_options.compute = compute;
  trainer_options.num_threads = options.num_threads;
  MOERL_ASSIGN_OR_RETURN(const auto model, TrainerModel::Create(config, parameters.views(), trainer_options));
  PackedBatch batch;
  batch.offsets = {0};
  for (int64_t s = 0; s < options.train_sequences; ++s) {
    for (int64_t i = 0; i < options.train_length; ++i) {
      batch.tokens.push_back(static_cast<int32_t>((s * 131 + i * i * 7 + i) % config.vocab_size));
    }
    batch.offsets.push_back(batch.num_tokens());
  }
  BackwardInput input;
  input.d_logprobs.assign(batch.tokens.size(), -1.0f / static_cast<float>(batch.tokens.size()));
  std::vector<double> seconds;
  for (int i = 0; i <= options.repeats; ++i) {
    const double start = Seconds(options.num_threads);
    MOERL_RETURN_IF_ERROR(model->Forward(batch).status());
    MOERL_RETURN_IF_ERROR(model->Backward(input));
    model->ClipAndStep({.learning_rate = 1e-5f});
    if (i > 0) seconds.push_back(Seconds(options.num_threads) - start);  // the first touches the memory
  }
  return static_cast<double>(batch.num_tokens()) / Median(seconds);
}

absl::StatusOr<double> GenerateTokensPerSecond(std::shared_ptr<const Weights> weights, int n,
                                               const ModelBenchOptions& options) {
  GeneratorOptions generator_options;
  generator_options.num_threads = options.num_threads;
  generator_options.num_pages = n * ((options.new_tokens + 8) / kPagePositions + 2);
  MOERL_ASSIGN_OR_RETURN(const auto generator, Generator::Create(std::move(weights), {0, 0}, generator_options));
  std::vector<double> rates;
  for (int i = 0; i <= options.repeats; ++i) {
    for (int s = 0; s < n; ++s) {
      Request request;
      request.id = request.group_id = s;
      request.run_seed = i;
      request.prompt = {1 + s, 2, 3, 4, 5, 6, 7, 8};
      request.samples.resize(1);
      request.sampling.max_new_tokens = options.new_tokens;
      MOERL_RETURN_IF_ERROR(generator->Add(std::move(request)));
    }
    MOERL_RETURN_IF_ERROR(generator->Step().status());  // prefill
    const double start = Seconds(options.num_threads);
    int64_t tokens = 0;
    while (!generator->idle()) {
      MOERL_ASSIGN_OR_RETURN(const StepOutput output, generator->Step());
      tokens += static_cast<int64_t>(output.samples.size());
    }
    if (i > 0) rates.push_back(static_cast<double>(tokens) / (Seconds(options.num_threads) - start));
  }
  return Median(rates);
}

}  // namespace

ModelConfig BenchConfig() {
  ModelConfig c;
  c.family = Family::kQwen3Moe;
  c.vocab_size = 8192;
  c.hidden_size = 512;
  c.num_layers = 8;
  c.num_heads = 8;
  c.num_kv_heads = 4;
  c.head_dim = 64;
  c.max_position = 4096;
  c.qk_norm = QkNorm::kPerHead;
  c.layer_has_experts.assign(c.num_layers, true);
  c.num_experts = 32;
  c.top_k = 4;
  c.moe_intermediate_size = 256;
  c.norm_topk_prob = true;
  return c;
}

absl::StatusOr<std::vector<Measurement>> MeasureModel(const ModelBenchOptions& options) {
  const ModelConfig config = BenchConfig();
  MOERL_ASSIGN_OR_RETURN(const Limits limits, MeasureLimits(options.num_threads));
  const TensorSet parameters = RandomParameters(config, 1);
  const auto wanted = [&](const std::string& name) { return absl::StrContains(name, options.only); };
  std::vector<Measurement> lines;
  for (const Compute compute : {Compute::kBf16, Compute::kFp32}) {
    const std::string type(ComputeName(compute)), name = absl::StrCat("train_", type);
    if (!wanted(name)) continue;
    MOERL_ASSIGN_OR_RETURN(const double rate, TrainTokensPerSecond(parameters, compute, options));
    // Backward is two products for each one of forward.
    const double flops = 3 * ForwardFlops(config, static_cast<double>(options.train_length) / 2) * rate;
    const double peak = compute == Compute::kBf16 ? limits.peak_flops_bf16 : limits.peak_flops_fp32;
    lines.push_back({name, rate, "tokens/s", absl::StrCat("peak_", type), flops / peak, 0.6, true});
  }
  WeightsOptions weights_options;
  weights_options.compute = Compute::kBf16;
  MOERL_ASSIGN_OR_RETURN(const auto weights, Weights::FromTensors(config, parameters.views(), weights_options));
  for (const auto& [n, goal] : {std::make_pair(1, 0.8), {8, 0.7}, {32, 0.7}}) {
    const std::string name = absl::StrCat("generate_bf16_n", n);
    if (!wanted(name)) continue;
    MOERL_ASSIGN_OR_RETURN(const double rate, GenerateTokensPerSecond(weights, n, options));
    const double reading = StepBytes(config, n, 2) / limits.bytes_per_s;
    const double computing =
        n * ForwardFlops(config, static_cast<double>(options.new_tokens) / 2) / limits.peak_flops_bf16;
    const double limit = n / std::max(reading, computing);
    lines.push_back(
        {name, rate, "tokens/s", reading > computing ? "read_bandwidth" : "peak_bf16", rate / limit, goal, true});
  }
  return lines;
}

}  // namespace moerl::model
