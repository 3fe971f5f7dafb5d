// One step of generation: rows through the model, tokens drawn, reports made.
#include <algorithm>
#include <utility>

#include "libs/base/check.h"
#include "libs/base/status_macros.h"
#include "libs/model/generator_impl.h"

namespace moerl::model {
namespace {

bool EndsWithStop(const std::vector<int32_t>& tokens, const SamplingParams& sampling) {
  const auto& ids = sampling.stop_token_ids;
  if (std::find(ids.begin(), ids.end(), tokens.back()) != ids.end()) return true;
  for (const auto& stop : sampling.stop_sequences) {
    if (stop.size() <= tokens.size() && std::equal(stop.rbegin(), stop.rend(), tokens.rbegin())) return true;
  }
  return false;
}

}  // namespace

FinishReason FinishOf(const std::vector<int32_t>& tokens, const SamplingParams& sampling) {
  if (tokens.empty()) return FinishReason::kNone;
  if (EndsWithStop(tokens, sampling)) return FinishReason::kStop;
  const bool full = static_cast<int64_t>(tokens.size()) >= sampling.max_new_tokens;
  return full ? FinishReason::kLength : FinishReason::kNone;
}

void Generator::Impl::NoteRoutes(const Work& w, const StepRows& rows, int64_t row_begin) {
  const int64_t width = config().num_moe_layers() * config().top_k;
  const uint16_t* from = rows.routes.data() + row_begin * width;
  if (w.sample == nullptr) {
    w.group->routes.insert(w.group->routes.end(), from, from + w.count * width);
    return;
  }
  const int64_t skip = std::clamp<int64_t>(w.sample->next_route - w.sample->cached, 0, w.count);
  w.sample->routes.insert(w.sample->routes.end(), from + skip * width, from + w.count * width);
  w.sample->next_route = std::max(w.sample->next_route, w.sample->cached + w.count);
}

void Generator::Impl::NotePromptLogProbs(const Engine& engine, const Work& w, const StepRows& rows, int64_t row_begin) {
  Group& group = *w.group;
  group.prompt_logprobs.resize(group.prompt_size(), 0.0f);
  const int64_t first = group.cached, last = std::min(first + w.count, group.prompt_size() - 1);
  if (first >= last) return;
  RowLogProbs(engine, rows, row_begin, absl::MakeSpan(group.request.prompt).subspan(first + 1, last - first),
              group.request.sampling.divisor(), arena_, &group.prompt_logprobs[first + 1]);
}

// The prompt is cached: its samples start from it. Full pages are shared, the last, partial one is each sample's own.
void Generator::Impl::Fork(Group& group) {
  const int64_t prompt = group.prompt_size();
  const size_t full = static_cast<size_t>(prompt / kPagePositions);
  std::vector<Sample*> waiting;
  for (Sample& sample : group.samples) {
    if (sample.state == SampleState::kPrompt) waiting.push_back(&sample);
  }
  for (size_t i = 0; i < waiting.size(); ++i) {
    Sample& sample = *waiting[i];
    const bool last = i + 1 == waiting.size();
    if (last) {
      sample.pages = std::move(group.pages);
      group.pages.clear();
    } else {
      for (size_t page = 0; page < full; ++page) {
        pool_.Share(group.pages[page]);
        sample.pages.push_back(group.pages[page]);
      }
      if (full < group.pages.size()) {
        if (pool_.num_free() == 0) {  // it comes back when there is one; the last sample never needs one
          BackToWaiting(sample);
          continue;
        }
        sample.pages.push_back(pool_.Copy(group.pages[full]));
      }
      load_.prefix_hit_tokens_total += prompt;
    }
    sample.state = SampleState::kRunning;
    sample.cached = prompt;
    if (group.request.want_routes && sample.next_route < prompt) {
      const int64_t width = config().num_moe_layers() * config().top_k;
      sample.routes.insert(sample.routes.end(), group.routes.begin() + sample.next_route * width, group.routes.end());
      sample.next_route = prompt;
    }
  }
  group.prefilling = false;
  group.cached = 0;
}

void Generator::Impl::Emit(Group& group, Sample& sample, int32_t id, float logprob, const std::vector<int32_t>& kept,
                           StepOutput* output) {
  SampleOutput out;
  out.request_id = group.request.id;
  out.sample_index = sample.index;
  out.first_token = sample.reported;
  out.tokens = {id};
  out.logprobs = {logprob};
  out.version = group.version;
  sample.tokens.push_back(id);
  sample.reported = static_cast<int64_t>(sample.tokens.size());
  if (group.request.want_routes) {
    const int64_t width = config().num_moe_layers() * config().top_k;
    const int64_t count = width > 0 ? static_cast<int64_t>(sample.routes.size()) / width : 0;
    out.first_route = sample.next_route - count;
    out.routes = std::exchange(sample.routes, {});
  }
  if (group.request.want_kept && group.request.sampling.filters()) {
    out.kept_ids = kept;
    out.kept_offsets = {0, static_cast<int64_t>(kept.size())};
  }
  out.finish = FinishOf(sample.tokens, group.request.sampling);
  if (out.finish != FinishReason::kNone) {
    ReleasePages(sample.pages);
    sample.state = SampleState::kDone;
  }
  output->samples.push_back(std::move(out));
}

// Runs work of one weight set.
absl::Status Generator::Impl::RunWork(absl::Span<const Work> work, StepOutput* output) {
  const std::shared_ptr<const Weights> weights = work.empty() ? weights_ : work[0].group->weights;
  const Engine engine = MakeEngine(*weights, *backend_, *exchange_);
  std::vector<StepChunk> chunks;
  bool want_routes = false;
  for (const Work& w : work) {
    StepChunk chunk;
    chunk.count = w.count;
    if (w.sample != nullptr) {
      // A running sample has its whole prompt cached.
      chunk.first_position = w.sample->cached;
      chunk.tokens = w.sample->tokens.data() + (w.sample->cached - w.group->prompt_size());
      chunk.pages = &w.sample->pages;
    } else {
      chunk.first_position = w.group->cached;
      chunk.tokens = w.group->request.prompt.data() + w.group->cached;
      chunk.pages = &w.group->pages;
    }
    for (const int32_t page : *chunk.pages) MOERL_CHECK(w.group->mixed_kv || pool_.version(page) == w.group->version);
    want_routes = want_routes || w.group->request.want_routes;
    chunks.push_back(chunk);
    (w.sample != nullptr && w.completes && w.count == 1 ? load_.decode_tokens_total : load_.prefill_tokens_total) +=
        w.count;
  }
  arena_.Reset();
  StepRows rows;
  MOERL_RETURN_IF_ERROR(RunStep(engine, rope_, chunks, pool_, want_routes, arena_, &rows));
  output->num_rows += rows.num_rows;

  // Book what was computed, then find who draws from which row.
  struct Drawer {
    Group* group;
    Sample* sample;
  };
  std::vector<DrawRequest> draws;
  std::vector<std::vector<Drawer>> drawers;
  for (size_t i = 0; i < work.size(); ++i) {
    const Work& w = work[i];
    Group& group = *w.group;
    if (want_routes && group.request.want_routes) NoteRoutes(w, rows, rows.row_begin[i]);
    std::vector<Drawer> from_row;
    if (w.sample != nullptr) {
      w.sample->cached += w.count;
      if (w.completes) from_row.push_back({&group, w.sample});
    } else {
      if (group.request.want_prompt_logprobs && !group.prompt_reported) {
        NotePromptLogProbs(engine, w, rows, rows.row_begin[i]);
      }
      group.cached += w.count;
      if (!w.completes) continue;
      if (group.request.want_prompt_logprobs && !group.prompt_reported) {
        output->prompts.push_back({group.request.id, group.version, group.prompt_logprobs});
        group.prompt_reported = true;
      }
      std::vector<Sample*> starting;
      for (Sample& sample : group.samples) {
        if (sample.state == SampleState::kPrompt) starting.push_back(&sample);
      }
      Fork(group);
      for (Sample* sample : starting) {
        if (sample->state == SampleState::kRunning && sample->tokens.empty()) from_row.push_back({&group, sample});
      }
    }
    if (from_row.empty()) continue;
    DrawRequest draw;
    draw.row = rows.row_begin[i] + w.count - 1;
    draw.sampling = &group.request.sampling;
    for (const Drawer& d : from_row) {
      const SampleKey key{group.request.run_seed, group.request.group_id, d.sample->index};
      const uint64_t position = static_cast<uint64_t>(group.prompt_size()) + d.sample->tokens.size();
      draw.uniforms.push_back(UniformRandom(key, RandomPurpose::kSampling, position));
    }
    draws.push_back(std::move(draw));
    drawers.push_back(std::move(from_row));
  }
  std::vector<DrawResult> results;
  DrawTokens(engine, rows, draws, arena_, &results);
  for (size_t i = 0; i < drawers.size(); ++i) {
    for (size_t j = 0; j < drawers[i].size(); ++j) {
      Emit(*drawers[i][j].group, *drawers[i][j].sample, results[i].ids[j], results[i].logprobs[j], results[i].kept,
           output);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<StepOutput> Generator::Impl::Step() {
  StepOutput output;
  output.samples = std::exchange(aborted_, {});
  Admit();
  output.started = std::exchange(started_, {});
  std::vector<Work> work = PlanStep();
  if (work.empty() && options_.exchange == nullptr) return output;
  // Under policy `finish` old and new weights may both be at work: one pass each, in a fixed order.
  std::stable_sort(work.begin(), work.end(), [](const Work& a, const Work& b) {
    return std::make_pair(a.group->version.epoch, a.group->version.number) <
           std::make_pair(b.group->version.epoch, b.group->version.number);
  });
  size_t begin = 0;
  do {
    size_t end = begin;
    while (end < work.size() && work[end].group->weights == work[begin].group->weights) ++end;
    MOERL_RETURN_IF_ERROR(RunWork(absl::MakeSpan(work).subspan(begin, end - begin), &output));
    begin = end;
  } while (begin < work.size());
  for (auto it = groups_.begin(); it != groups_.end();) {
    if (!(*it)->done()) {
      ++it;
      continue;
    }
    by_id_.erase((*it)->request.id);
    it = groups_.erase(it);
  }
  return output;
}

}  // namespace moerl::model
