#include "services/trainer/mismatch_inquiry.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "libs/model/stages.h"

namespace moerl::trainer {
namespace {

constexpr size_t kNamedMax = 8;  // servers in a verdict

}  // namespace

MismatchInquiry::MismatchInquiry(uint64_t id, VersionName version, std::vector<uint64_t> stage_digests,
                                 const model::ModelConfig& config, std::map<ConnectionId, std::string> workers)
    : id_(id),
      version_(version),
      stage_digests_(std::move(stage_digests)),
      config_(config),
      waiting_(std::move(workers)) {}

void MismatchInquiry::OnReport(ConnectionId connection, uint64_t id, VersionName version,
                               const std::vector<uint64_t>& stage_digests) {
  const auto worker = waiting_.find(connection);
  if (id != id_ || worker == waiting_.end()) return;
  if (version != version_ || stage_digests.size() != stage_digests_.size()) {
    ++num_other_version_;
  } else {
    const auto part = std::mismatch(stage_digests_.begin(), stage_digests_.end(), stage_digests.begin()).first;
    if (part == stage_digests_.end()) {
      ++num_equal_;
    } else {
      differing_.push_back(absl::StrCat(StageName(config_, part - stage_digests_.begin()), " of ", worker->second));
    }
  }
  waiting_.erase(worker);
}

void MismatchInquiry::OnBreak(ConnectionId connection) {
  num_gone_ += static_cast<int64_t>(waiting_.erase(connection));
}

std::string MismatchInquiry::Verdict() const {
  if (!differing_.empty()) {
    const size_t count = std::min(differing_.size(), kNamedMax);
    const std::string more =
        differing_.size() > count ? absl::StrCat(", and ", differing_.size() - count, " more") : "";
    return absl::StrCat(absl::StrJoin(differing_.begin(), differing_.begin() + static_cast<int64_t>(count), ", "),
                        more);
  }
  return absl::StrCat("not found: asked again, ", num_equal_, " rollout servers compute what the trainer does, ",
                      num_other_version_, " have other weights by now, ", num_gone_, " are gone, ", waiting_.size(),
                      " did not answer");
}

}  // namespace moerl::trainer
