// Who gets places and pages: admission in order of arrival, preemption of the youngest.
#include <algorithm>

#include "libs/model/generator_impl.h"

namespace moerl::model {

// Starts the shared prefill of a group for as many of its waiting samples as there are places and pages for.
bool Generator::Impl::AdmitGroup(Group& group) {
  int64_t places = options_.running_samples_max;
  for (const auto& other : groups_) {
    for (const Sample& s : other->samples)
      places -= s.state == SampleState::kPrompt || s.state == SampleState::kRunning;
  }
  // The prompt's pages once, and for each sample what it has beyond the prompt's full pages, one position ahead.
  const int64_t shared = group.prompt_size() / kPagePositions;
  int64_t free = pool_.num_free() - shared;
  std::vector<Sample*> admitted;
  for (Sample& sample : group.samples) {
    if (sample.state != SampleState::kWaiting) continue;
    const int64_t own = PagesFor(group.prompt_size() + static_cast<int64_t>(sample.tokens.size()) + 1) - shared;
    if (static_cast<int64_t>(admitted.size()) >= places || free < own) break;
    free -= own;
    admitted.push_back(&sample);
  }
  if (admitted.empty()) return false;
  if (group.weights == nullptr) {
    group.weights = weights_;
    group.version = version_;
  }
  group.prefilling = true;
  group.cached = 0;
  group.admitted = ++admissions_;
  group.routes.clear();
  group.prompt_logprobs.clear();
  for (Sample* sample : admitted) {
    if (sample->admitted == 0) started_.push_back({group.request.id, sample->index});
    sample->state = SampleState::kPrompt;
    sample->admitted = ++admissions_;
  }
  // Its pages are taken at once: what was counted as free must not be promised twice.
  while (static_cast<int64_t>(group.pages.size()) < PagesFor(group.prompt_size())) {
    group.pages.push_back(pool_.Allocate(group.version));
  }
  return true;
}

// First come, first served: a group that does not fit holds back those behind it.
void Generator::Impl::Admit() {
  for (const auto& group : groups_) {
    const bool waits = std::any_of(group->samples.begin(), group->samples.end(),
                                   [](const Sample& s) { return s.state == SampleState::kWaiting; });
    if (!waits || group->prefilling) continue;
    if (!AdmitGroup(*group)) return;
  }
}

// Takes back the pages of the youngest sample or prefill that came after `admitted`. False when there is none.
bool Generator::Impl::PreemptYoungerThan(uint64_t admitted) {
  Group* victim_group = nullptr;
  Sample* victim = nullptr;
  uint64_t youngest = admitted;
  for (const auto& group : groups_) {
    if (group->prefilling && group->admitted > youngest) {
      youngest = group->admitted;
      victim_group = group.get();
      victim = nullptr;
    }
    for (Sample& sample : group->samples) {
      if (sample.state != SampleState::kRunning || sample.admitted <= youngest) continue;
      youngest = sample.admitted;
      victim_group = group.get();
      victim = &sample;
    }
  }
  if (victim_group == nullptr) return false;
  ++load_.preemptions_total;
  if (victim != nullptr) {
    BackToWaiting(*victim);
  } else {
    StopPrefill(*victim_group);
  }
  return true;
}

// Gives a sequence pages for `positions` positions, taking them from younger ones if it must. False: it was itself the
// youngest and lost its own.
bool Generator::Impl::Reserve(Group& group, Sample* sample, std::vector<int32_t>& pages, int64_t positions) {
  while (static_cast<int64_t>(pages.size()) < PagesFor(positions)) {
    if (pool_.num_free() > 0) {
      pages.push_back(pool_.Allocate(group.version));
      continue;
    }
    if (PreemptYoungerThan(sample != nullptr ? sample->admitted : group.admitted)) continue;
    ++load_.preemptions_total;
    if (sample != nullptr) {
      BackToWaiting(*sample);
    } else {
      StopPrefill(group);
    }
    return false;
  }
  return true;
}

void Generator::Impl::TakeRows(Group& group, Sample* sample, int64_t uncached, int64_t budget_left,
                               std::vector<Work>* work, int64_t* used) {
  const int64_t count = std::min(uncached, budget_left);
  if (count <= 0) return;
  std::vector<int32_t>& pages = sample != nullptr ? sample->pages : group.pages;
  const int64_t cached = sample != nullptr ? sample->cached : group.cached;
  if (!Reserve(group, sample, pages, cached + count)) return;
  work->push_back({&group, sample, count, count == uncached});
  *used += count;
}

// Decode rows first, then prefill in order of arrival, up to step_tokens_max rows.
std::vector<Generator::Impl::Work> Generator::Impl::PlanStep() {
  std::vector<Work> work;
  int64_t used = 0;
  const auto uncached = [](const Group& g, const Sample& s) {
    return g.prompt_size() + static_cast<int64_t>(s.tokens.size()) - s.cached;
  };
  for (const bool decode : {true, false}) {
    for (const auto& group : groups_) {
      for (Sample& sample : group->samples) {
        if (sample.state != SampleState::kRunning || (uncached(*group, sample) == 1) != decode) continue;
        TakeRows(*group, &sample, uncached(*group, sample), options_.step_tokens_max - used, &work, &used);
      }
      if (!decode && group->prefilling) {
        TakeRows(*group, nullptr, group->prompt_size() - group->cached, options_.step_tokens_max - used, &work, &used);
      }
    }
  }
  // A later reservation may have taken the pages of a sequence planned earlier.
  work.erase(std::remove_if(work.begin(), work.end(),
                            [](const Work& w) {
                              return w.sample != nullptr ? w.sample->state != SampleState::kRunning
                                                         : !w.group->prefilling;
                            }),
             work.end());
  return work;
}

}  // namespace moerl::model
