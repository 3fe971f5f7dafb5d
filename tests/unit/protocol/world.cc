#include "tests/unit/protocol/world.h"

#include <xxhash.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"
#include "libs/experience/mutant.h"

namespace moerl::protocol_test {
namespace {

constexpr int64_t kEventsMax = 60000;
constexpr double kSecondsMax = 3000.0;

}  // namespace

const std::vector<std::string> kMutants = {"bug_ack_before_durable",
                                           "bug_admission_ignores_drops",
                                           "bug_break_ends_lease",
                                           "bug_no_min_version",
                                           "bug_no_fork",
                                           "bug_no_ledger_position",
                                           "bug_old_epoch",
                                           "hole_ledger_unfenced",
                                           "hole_newest_directory",
                                           "hole_version_number_only",
                                           "hole_never_down",
                                           "hole_retire_once",
                                           "hole_retired_prefix",
                                           "hole_only_back",
                                           "hole_noop_if_retired",
                                           "hole_no_end_cap",
                                           "hole_no_offset",
                                           "hole_stale_hello",
                                           "hole_future_by_answer",
                                           "hole_future_by_trainer",
                                           "hole_batches_kept",
                                           "hole_refused_keeps_lease"};

uint64_t Hash(std::initializer_list<uint64_t> parts) { return XXH3_64bits(parts.begin(), parts.size() * 8); }

// ---------------------------------------------------------------------------------------------- processes, streams

Process::Process(World& world, std::string name)
    : world(world), name(std::move(name)), rate(world.Uniform(0.8, 1.25)) {}

double Process::ClockSeconds() const { return world.now * rate; }

void Process::Kill() {
  alive = false;
  for (const auto& stream : std::vector(world.streams)) {
    if (stream->rollout == this || stream->trainer == this) stream->Cut();
  }
}

void Process::ResumeFromPause() {
  paused = false;
  for (auto& event : std::exchange(waiting, {})) world.After(0.0, this, std::move(event));
}

void Stream::Send(bool to_trainer, Process* to, std::function<void()> deliver) {
  if (!open) return;
  const int64_t n = ++sent_[to_trainer];
  last_[to_trainer] = std::max(last_[to_trainer] + 0.001, world_.now + world_.Lag());
  world_.After(last_[to_trainer] - world_.now, to,
               [self = shared_from_this(), to_trainer, n, deliver = std::move(deliver)] {
                 if (!self->open && !(to_trainer && n <= self->limit_)) return;
                 self->read_[to_trainer] = n;
                 deliver();
               });
}

void Stream::ToTrainer(WorkerMessage message) {
  Send(true, trainer,
       [self = shared_from_this(), message = std::move(message)] { self->trainer->OnMessage(self, message); });
}

void Stream::ToRollout(TrainerMessage message) {
  Send(false, rollout,
       [self = shared_from_this(), message = std::move(message)] { self->rollout->OnMessage(self, message); });
}

void Stream::Cut() {
  if (!open) return;
  open = false;
  limit_ = world_.UniformInt(read_[1], sent_[1]);
  std::erase(world_.streams, shared_from_this());
  const double tail_read = std::max(0.0, last_[1] - world_.now);
  world_.After(tail_read + 0.001 + world_.Lag(), trainer,
               [self = shared_from_this()] { self->trainer->OnBreak(self); });
}

// ---------------------------------------------------------------------------------------------- weight_sync

bool VersionStore::IsFenced(int64_t epoch) {
  if (epoch != epoch_ && !MOERL_MUTANT(bug_old_epoch)) return true;
  world_.Expect(epoch >= epoch_, "I7", absl::StrCat("weight_sync changed by epoch ", epoch, " after ", epoch_));
  return false;
}

int64_t VersionStore::Acquire(uint64_t request_id) {
  const auto [answer, is_new] = answers_.try_emplace(request_id, 0);
  if (is_new) {  // a repeated request gets its first answer
    answer->second = ++epoch_;
    std::erase_if(rows_, [](const auto& entry) { return entry.second.state == State::kStaging; });
  }
  return answer->second;
}

bool VersionStore::RecordForks(int64_t epoch, const std::vector<Fork>& forks) {
  if (IsFenced(epoch)) return false;
  forks_ = forks;
  for (auto& [name, row] : rows_) {
    if (IsRetired(name, forks)) row.state = State::kRetired;
  }
  return true;
}

bool VersionStore::Begin(int64_t epoch, int64_t number) {
  if (IsFenced(epoch)) return false;
  rows_.try_emplace({epoch, number});
  return true;
}

VersionStore::CommitAnswer VersionStore::Commit(int64_t epoch, int64_t number, uint64_t root) {
  if (IsFenced(epoch)) return CommitAnswer::kFenced;
  VersionName name{epoch, number};
  const auto old = std::find_if(rows_.begin(), rows_.end(), [&](const auto& entry) {
    const Row& row = entry.second;
    return entry.first.number == number &&
           (row.state == State::kReady || row.state == State::kAged ||
            (MOERL_MUTANT(hole_noop_if_retired) && row.state == State::kRetired && row.root == root));
  });
  if (old != rows_.end()) {
    if (old->first != name) {
      const VersionName kept = old->first;
      rows_.erase(name);
      name = kept;
    }
    if (rows_.at(name).root != root) return CommitAnswer::kDiverged;
  }
  if (!rows_.contains(name)) return CommitAnswer::kNotBegun;
  if (rows_[name].state != State::kRetired) rows_[name] = {State::kReady, root};  // an aged one too
  const uint64_t first_root = world_.roots.try_emplace(name, root).first->second;
  world_.Expect(first_root == root, "I5", absl::StrCat("READY version ", number, " changed bytes"));
  std::vector<std::pair<int64_t, VersionName>> ready;
  for (const auto& [key, row] : rows_) {
    if (row.state == State::kReady) ready.push_back({key.number, key});
  }
  std::sort(ready.begin(), ready.end());
  for (size_t i = 0; i + kKeep < ready.size(); ++i) rows_[ready[i].second].state = State::kAged;
  return CommitAnswer::kOk;
}

VersionStore::Listing VersionStore::Latest() const {
  Listing listing;
  listing.forks = forks_;
  for (const auto& [name, row] : rows_) {
    if (row.state != State::kReady) continue;
    if (listing.latest && name.number < listing.latest->number) continue;
    listing.latest = name;
    listing.root = row.root;
  }
  return listing;
}

// ---------------------------------------------------------------------------------------------- ledger

DurableLedger::DurableLedger(World& world, std::unique_ptr<trainer::SqliteLedger> file)
    : world_(world), file_(std::move(file)) {
  state_.group_size = kSamples;
}

absl::StatusOr<trainer::LedgerState> DurableLedger::Open(int64_t epoch) {
  if (epoch <= state_.epoch) return absl::AbortedError("a newer epoch has been here");
  state_.epoch = epoch;
  if (!file_) return state_;
  auto loaded = file_->Open(epoch);
  MOERL_CHECK(loaded.ok() && *loaded == state_);
  return loaded;
}

absl::Status DurableLedger::Commit(int64_t epoch, std::span<const trainer::LedgerWrite> writes) {
  if (epoch != state_.epoch && !MOERL_MUTANT(hole_ledger_unfenced)) return absl::AbortedError("fenced");
  world_.Expect(epoch >= state_.epoch || writes.empty(), "I7",
                absl::StrCat("ledger changed by epoch ", epoch, " after ", state_.epoch));
  if (file_) {
    const absl::Status status = file_->Commit(epoch, writes);
    MOERL_CHECK(status.ok());
  }
  for (const trainer::LedgerWrite& write : writes) state_.Apply(write);
  for (const trainer::LedgerWrite& write : writes) {
    const auto* outcome = std::get_if<trainer::PutOutcome>(&write);
    if (!outcome) continue;
    const trainer::Group& group = state_.groups[static_cast<size_t>(outcome->group)];
    if (group.state == trainer::GroupState::kFinished) world_.digests[group.number] = world_.DigestOf(group);
  }
  return absl::OkStatus();
}

void DurableLedger::CheckFile() {
  if (!file_) return;
  const auto loaded = file_->Load();
  world_.Expect(loaded.ok() && *loaded == state_, "I6", "the file does not hold what was committed");
}

// ---------------------------------------------------------------------------------------------- task

int64_t World::LengthOf(int64_t group, int64_t sample) const {
  return 2 + static_cast<int64_t>(Hash({seed, 1, static_cast<uint64_t>(group), static_cast<uint64_t>(sample)}) % 4);
}

bool World::RewardFails(int64_t group, int64_t sample) const {
  return Hash({seed, 2, static_cast<uint64_t>(group), static_cast<uint64_t>(sample)}) % 9 == 0;
}

int32_t World::TokenOf(int64_t group, int64_t sample, std::span<const int32_t> prefix, uint64_t root) const {
  const uint64_t before = XXH3_64bits(prefix.data(), prefix.size() * sizeof(int32_t));
  return static_cast<int32_t>(
      Hash({seed, 3, static_cast<uint64_t>(group), static_cast<uint64_t>(sample), prefix.size(), root, before}) &
      0x3fffffff);
}

uint64_t World::Train(uint64_t weights, const std::vector<uint64_t>& digests, int64_t ranks) {
  const uint64_t contents = XXH3_64bits(digests.data(), digests.size() * 8);
  return Hash({weights, contents, static_cast<uint64_t>(ranks)});
}

uint64_t World::DigestOf(int64_t group, const std::vector<std::vector<int32_t>>& samples) {
  uint64_t digest = Hash({static_cast<uint64_t>(group)});
  for (const auto& ids : samples) digest = Hash({digest, ids.size(), XXH3_64bits(ids.data(), ids.size() * 4)});
  return digest;
}

uint64_t World::DigestOf(const trainer::Group& group) const {
  std::vector<std::vector<int32_t>> samples;
  for (const auto& sample : group.samples) samples.push_back(sample->tokens.ids);
  return DigestOf(group.number, samples);
}

// Weights after all steps, synchronous and without faults, computed without any of the machinery.
uint64_t World::Undisturbed() const {
  uint64_t weights = WeightsAtStart();
  int64_t group = 0;
  for (int64_t step = 0; step < kSteps; ++step) {
    std::vector<uint64_t> batch;
    for (; batch.size() < kBatch; ++group) {
      bool fails = false;
      std::vector<std::vector<int32_t>> samples(kSamples);
      for (int64_t i = 0; i < kSamples; ++i) {
        auto& ids = samples[static_cast<size_t>(i)];
        while (static_cast<int64_t>(ids.size()) < LengthOf(group, i)) ids.push_back(TokenOf(group, i, ids, weights));
        fails = fails || RewardFails(group, i);
      }
      if (!fails) batch.push_back(DigestOf(group, samples));
    }
    weights = Train(weights, batch, kRanks);
  }
  return weights;
}

// ---------------------------------------------------------------------------------------------- observer

bool World::Expect(bool holds, const std::string& invariant, const std::string& text) {
  if (!holds) result.violations.push_back({invariant, text});
  return holds;
}

void World::OnTrains(int64_t step, const std::vector<int64_t>& batch, int64_t epoch) {
  const trainer::LedgerState& state = ledger.state();
  if (epoch != state.epoch && !MOERL_MUTANT(hole_ledger_unfenced)) return;  // a fenced trainer computes for nobody
  for (int64_t number : batch) {
    const trainer::Group& group = state.groups[static_cast<size_t>(number)];
    const std::string where = absl::StrCat("step ", step, " group ", number);
    for (int64_t i = 0; i < kSamples; ++i) {
      const auto& sample = group.samples[static_cast<size_t>(i)];
      if (!Expect(sample != nullptr, "I1", where + ": its payload is gone")) continue;
      const rl::TokenRun& tokens = sample->tokens;
      for (size_t p = 0; p < tokens.size(); ++p) {
        const VersionName version = tokens.versions[p];
        Expect(version.number >= step - 1 - group.staleness, "I2", where + ": too stale");
        Expect(!IsRetired(version, state.forks), "I3", where + ": token of a retired version");
        const uint64_t root = version.number == 0 ? WeightsAtStart() : trained[version.number].first;
        const int32_t expected = TokenOf(number, i, std::span(tokens.ids).first(p), root);
        Expect(tokens.ids[p] == expected, "I3",
               absl::StrCat(where, ": token ", p, " is not what version ", version.number, " samples"));
      }
    }
  }
}

bool World::IsFinished() const {
  const trainer::LedgerState& state = ledger.state();
  return trained.size() == kSteps && !state.checkpoints.empty() && state.checkpoints.back().step == kSteps &&
         std::all_of(state.groups.begin(), state.groups.end(), [](const trainer::Group& group) {
           return group.state == trainer::GroupState::kTrained || group.state == trainer::GroupState::kDropped;
         });
}

void World::CheckEnd() {
  const trainer::LedgerState& state = ledger.state();
  if (!Expect(IsFinished(), "I8", absl::StrCat(trained.size(), " of ", kSteps, " steps, ", num_events_, " events"))) {
    return;
  }
  std::set<int64_t> ids;
  uint64_t root = WeightsAtStart();
  for (int64_t step = 1; step <= kSteps; ++step) {
    std::vector<uint64_t> contents;
    for (int64_t number : state.batches.at(step).groups) {
      Expect(ids.insert(number).second, "I1", absl::StrCat("group ", number, " trained twice"));
      contents.push_back(digests[number]);
    }
    root = Train(root, contents, trained[step].second);
    Expect(root == trained[step].first, "I5", absl::StrCat("version ", step, " is not what its batch gives"));
  }
  Expect(static_cast<int64_t>(ids.size()) == kSteps * kBatch, "I1", "wrong number of trained groups");
  for (const trainer::Group& group : state.groups) {
    Expect(group.prompt_index == group.number, "I1", "prompt skipped or repeated");
    const bool accounted = ids.contains(group.number) ? group.state == trainer::GroupState::kTrained
                                                      : group.reason != trainer::DropReason::kNone;
    Expect(accounted, "I1", absl::StrCat("group ", group.number, " is not accounted for"));
  }
  const VersionStore::Listing listing = store.Latest();
  Expect(listing.latest && listing.root == root, "I5", "the last version is not READY");
  if (eta == 0 && rank_changes == 0) Expect(root == Undisturbed(), "I4", "not the undisturbed weights");
  ledger.CheckFile();
}

// ---------------------------------------------------------------------------------------------- the world

World::World(uint64_t seed, int64_t eta, Faults faults, std::unique_ptr<trainer::SqliteLedger> file)
    : seed(seed),
      eta(eta),
      faulty(faults != Faults::kNone),
      rng(Hash({seed, 1000 + static_cast<uint64_t>(eta)})),
      store(*this),
      ledger(*this, std::move(file)),
      change_ranks_(faults == Faults::kAll && seed % 2 == 0) {
  weight_sync = std::make_unique<Process>(*this, "weight_sync");
  StartTrainer();
  const int64_t servers = UniformInt(1, 3);
  for (int64_t i = 0; i < servers; ++i) Join(absl::StrCat("rollout-", i));
  const int64_t faults_to_come = faulty ? UniformInt(2, 12) : 0;
  for (int64_t i = 0; i < faults_to_come; ++i) {
    const double when = Uniform(0, 170);
    last_fault_ = std::max(last_fault_, when + 40);
    After(when, nullptr, [this] { Fault(); });
  }
}

double World::Uniform(double low, double high) {
  return low + (high - low) * (static_cast<double>(rng() >> 11) * 0x1.0p-53);
}

int64_t World::UniformInt(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(rng() % static_cast<uint64_t>(high - low + 1));
}

double World::Lag() { return faulty && Chance(0.03) ? Uniform(5, 35) : Uniform(0.1, 1); }

void World::After(double seconds, Process* process, std::function<void()> event) {
  static int64_t order = 0;
  const bool for_weight_sync = process != nullptr && process == weight_sync.get();
  heap_.push_back({now + seconds, ++order, for_weight_sync, process, std::move(event)});
  std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
}

void World::Join(const std::string& name) {
  all_rollouts.push_back(std::make_unique<RolloutProcess>(*this, name));
  rollouts[name] = all_rollouts.back().get();
}

void World::StartTrainer() {
  if (change_ranks_ && !trainers.empty() && Chance(0.5)) {
    ranks = 3 - ranks;
    ++rank_changes;
  }
  trainers.push_back(std::make_unique<TrainerProcess>(*this, ranks));
  if (now > 0 && now < last_fault_ && Chance(0.25)) {  // again, while it resumes
    After(Uniform(0, 6), nullptr, [process = trainers.back().get()] { process->Kill(); });
  }
}

void World::PauseTrainer(TrainerProcess* trainer, bool replace) {
  trainer->paused = true;
  for (const auto& stream : std::vector(streams)) {
    if (stream->trainer == trainer) After(Uniform(0, 15), nullptr, [stream] { stream->Cut(); });
  }
  if (replace) After(Uniform(1, 10), nullptr, [this] { StartTrainer(); });
  After(Uniform(5, 40), nullptr, [trainer] { trainer->ResumeFromPause(); });
}

void World::Fault() {
  static const char* const kKinds[] = {"trainer", "trainer", "rollout", "rollout", "ws",   "break",
                                       "break",   "zombie",  "pause",   "join",    "drain"};
  const std::string kind = kKinds[UniformInt(0, 10)];
  ++result.counts[kind];
  TrainerProcess* trainer = nullptr;
  for (const auto& process : trainers) {
    if (process->alive && !process->paused) trainer = process.get();
  }
  std::vector<RolloutProcess*> live;
  for (const auto& [name, process] : rollouts) {
    if (process->alive) live.push_back(process);
  }
  RolloutProcess* rollout = live.empty() ? nullptr : live[rng() % live.size()];
  if (kind == "trainer" && trainer) {
    trainer->Kill();
  } else if (kind == "ws" && weight_sync->alive) {
    weight_sync->alive = false;
    After(Uniform(1, 15), nullptr, [this] { weight_sync->alive = true; });
  } else if ((kind == "zombie" || kind == "pause") && trainer) {
    PauseTrainer(trainer, kind == "zombie");
  } else if (kind == "break" && !streams.empty()) {
    streams[rng() % streams.size()]->Cut();
  } else if (kind == "rollout" && rollout) {
    rollout->Kill();
    if (Chance(0.7)) After(Uniform(0.5, 10), nullptr, [this, name = rollout->name] { Join(name); });
  } else if (kind == "drain" && rollout) {
    rollout->draining = true;
  } else if (kind == "join") {
    Join(absl::StrCat("rollout-", rollouts.size()));
  }
}

void World::Tick() {
  After(1.0, nullptr, [this] { Tick(); });
}

void World::Run() {
  double watch = 0.0;
  Tick();
  while (num_events_ < kEventsMax && now < kSecondsMax && result.violations.empty() && !heap_.empty()) {
    std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
    Event event = std::move(heap_.back());
    heap_.pop_back();
    now = event.time;
    ++num_events_;
    if (event.process == nullptr || (event.process->alive && !event.process->paused)) {
      event.run();
    } else if (event.process->alive) {
      event.process->waiting.push_back(std::move(event.run));
    }
    if (now <= watch) continue;
    watch = now + 3.0;  // who watches over the processes
    if (std::none_of(trainers.begin(), trainers.end(), [](const auto& process) { return process->alive; })) {
      StartTrainer();
    }
    const bool nobody = std::all_of(rollouts.begin(), rollouts.end(),
                                    [](const auto& entry) { return !entry.second->alive || entry.second->draining; });
    if (now > 200 && nobody) Join("rollout-last");
    if (now > last_fault_ && IsFinished()) break;
  }
  if (result.violations.empty()) CheckEnd();
}

RunResult RunWorld(uint64_t seed, int64_t eta, Faults faults, Storage storage, const std::string& directory) {
  std::unique_ptr<trainer::SqliteLedger> file;
  if (storage == Storage::kSqlite) {
    auto opened = trainer::SqliteLedger::OpenFile(absl::StrCat(directory, "/", seed, "-", eta, ".sqlite"),
                                                  {"simulation", kSamples, "prompts"});
    MOERL_CHECK(opened.ok());
    file = std::move(*opened);
  }
  World world(seed, eta, faults, std::move(file));
  world.Run();
  return std::move(world.result);
}

}  // namespace moerl::protocol_test
