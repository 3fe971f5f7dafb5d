#include "services/rollout/weight_follower.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "libs/base/clock.h"
#include "libs/base/failpoint.h"
#include "libs/base/log.h"
#include "libs/base/status_macros.h"
#include "libs/model/config.h"
#include "services/rollout/rollout_metrics.h"

namespace moerl::rollout {
namespace {

model::TensorView ToModel(const weights::TensorView& tensor) {
  model::TensorView view;
  view.name = tensor.name;
  view.dtype = tensor.type == weights::ElementType::kBf16 ? model::FileDType::kBF16 : model::FileDType::kF32;
  view.shape.assign(tensor.shape.begin(), tensor.shape.end());
  view.bytes = absl::string_view(reinterpret_cast<const char*>(tensor.data.data()), tensor.data.size());
  return view;
}

// The negative control of the mismatch guard: the highest bit of the mantissa of the element in the middle of the
// tensor that the failpoint names.
void FlipBit(model::TensorView& tensor, std::string& storage) {
  if (MOERL_FAILPOINT(absl::StrCat("rollout.flip_weight_bit.", tensor.name)).ok()) return;
  storage.assign(tensor.bytes.data(), tensor.bytes.size());
  const auto element_bytes = static_cast<size_t>(model::FileDTypeBytes(tensor.dtype));
  storage[storage.size() / element_bytes / 2 * element_bytes + element_bytes - 2] ^= 0x40;
  tensor.bytes = storage;
  LogWarning("flipped a bit of a weight", {{"tensor", tensor.name}});
}

}  // namespace

absl::StatusOr<std::shared_ptr<const model::Weights>> PackVersion(const weights::LocalVersion& version,
                                                                  model::Compute compute) {
  MOERL_ASSIGN_OR_RETURN(const model::ModelConfig config, model::ParseConfig(version.manifest().model_config_json));
  std::vector<model::TensorView> tensors;
  for (const weights::TensorView& tensor : version.tensors()) tensors.push_back(ToModel(tensor));
  std::string spoiled;
  for (model::TensorView& tensor : tensors) FlipBit(tensor, spoiled);
  model::WeightsOptions options;
  options.compute = compute;
  return model::Weights::FromTensors(config, tensors, options);
}

WeightFollower::WeightFollower(std::shared_ptr<grpc::Channel> channel, const Options& options,
                               absl::AnyInvocable<void(WeightUpdate)> on_update)
    : options_(options), on_update_(std::move(on_update)) {
  weights::ReaderOptions reader;
  reader.directory = options.directory;
  reader.holder = options.holder;
  reader.check = [](const weights::Manifest& manifest) {
    return model::ParseConfig(manifest.model_config_json).status();
  };
  reader.on_change = [this] {
    absl::MutexLock lock(&mutex_);
    has_changed_ = true;
  };
  reader_ = std::make_unique<weights::Reader>(std::move(channel), std::move(reader));
  thread_ = std::thread([this] { Run(); });
}

WeightFollower::~WeightFollower() {
  {
    absl::MutexLock lock(&mutex_);
    is_stopping_ = true;
  }
  thread_.join();
  reader_.reset();  // on_change uses the members above
}

void WeightFollower::Run() {
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      const auto is_wanted = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return has_changed_ || is_stopping_; };
      mutex_.Await(absl::Condition(&is_wanted));
      if (is_stopping_) return;
      has_changed_ = false;
    }
    Follow(reader_->Now());
  }
}

void WeightFollower::Follow(const weights::Readable& readable) {
  if (readable.forks != forks_) {
    forks_ = readable.forks;
    on_update_({forks_, {}, nullptr});
  }
  if (readable.version == nullptr || handled_ == readable.version->name()) return;
  handled_ = readable.version->name();
  const absl::Duration start = SystemClock()->Now();
  absl::StatusOr<std::shared_ptr<const model::Weights>> weights = PackVersion(*readable.version, options_.compute);
  if (!weights.ok()) {
    LogError("cannot run a version of the weights",
             {{"version", weights::ToString(*handled_)}, {"reason", std::string(weights.status().message())}});
    return;
  }
  const double seconds = absl::ToDoubleSeconds(SystemClock()->Now() - start);
  Metrics().pack_seconds.Observe(seconds);
  LogInfo("weights staged", {{"version", weights::ToString(*handled_)}, {"seconds", seconds}});
  on_update_({forks_, *handled_, *std::move(weights)});
}

}  // namespace moerl::rollout
