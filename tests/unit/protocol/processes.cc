// The simulated trainer and rollout server: they carry the state machines' messages, as the programs do.

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"
#include "libs/experience/mutant.h"
#include "services/trainer/resume.h"
#include "tests/unit/protocol/world.h"

namespace moerl::protocol_test {
namespace {

// Calls weight_sync on behalf of `caller` until it answers; weight_sync may be down or slow.
template <typename Answer>
void Call(Process* caller, std::shared_ptr<bool> done, std::function<Answer()> method,
          std::function<void(Answer)> next) {
  if (*done) return;
  World& world = caller->world;
  world.After(world.Lag(), world.weight_sync.get(), [=, &world] {
    Answer answer = method();
    world.After(world.Lag(), caller, [=] {
      if (std::exchange(*done, true)) return;
      next(answer);
    });
  });
  world.After(9.0, caller, [=] { Call<Answer>(caller, done, method, next); });
}

template <typename Answer>
void Call(Process* caller, std::function<Answer()> method, std::function<void(Answer)> next) {
  Call<Answer>(caller, std::make_shared<bool>(false), std::move(method), std::move(next));
}

}  // namespace

// ---------------------------------------------------------------------------------------------- trainer

TrainerProcess::TrainerProcess(World& world, int64_t ranks)
    : Process(world, "trainer"), request_id_(world.rng()), ranks_(ranks) {
  Call<int64_t>(
      this, [this] { return this->world.store.Acquire(request_id_); },
      [this](int64_t epoch) {
        epoch_ = epoch;
        this->world.After(0.3, this, [this] { OpenLedger(); });
      });
}

bool TrainerProcess::CommitNow(std::span<const trainer::LedgerWrite> writes) {
  if (!alive) return false;
  if (world.ledger.Commit(epoch_, writes).ok()) return true;
  Kill();
  return false;
}

void TrainerProcess::OpenLedger() {
  auto state = world.ledger.Open(epoch_);
  if (!state.ok()) return Kill();
  if (state->checkpoints.empty()) {  // after the warm start, before anything is published
    const trainer::LedgerWrite write = trainer::NameCheckpoint{{0, epoch_}, kKeep};
    world.directories[{0, epoch_}] = {0, world.WeightsAtStart(), state->HashOfTrained(0), 0};
    state->Apply(write);
    if (!CommitNow({&write, 1})) return;
  }
  ResumeRun(std::move(*state));
}

void TrainerProcess::ResumeRun(trainer::LedgerState state) {
  const auto& names = state.checkpoints;
  trainer::CheckpointName name = names.back();
  if (world.faulty && world.Chance(0.15) && names.size() > 1) name = names[names.size() - 2];
  if (MOERL_MUTANT(hole_newest_directory)) name = world.directories.rbegin()->first;
  const Checkpoint checkpoint = world.directories.at(name);
  const trainer::ResumePlan plan = trainer::Resume(state, epoch_, checkpoint.step, ranks_, /*is_reconfigured=*/false);
  if (!CommitNow(plan.writes)) return;
  const bool agrees = checkpoint.trained == state.HashOfTrained(checkpoint.step);
  world.Expect(agrees || MOERL_MUTANT(bug_no_ledger_position), "I1", "checkpoint and ledger disagree");
  step_ = checkpoint.step;
  weights_ = checkpoint.weights;
  if (MOERL_MUTANT(bug_no_ledger_position) && !world.trained.empty()) step_ = world.trained.rbegin()->first;
  const bool tell_forks = plan.forked || !MOERL_MUTANT(hole_retire_once);
  const auto shared = std::make_shared<trainer::LedgerState>(std::move(state));
  const auto publish = [this, shared] {
    Publish(step_, weights_, [this, shared] {
      Call<VersionStore::Listing>(
          this, [this] { return world.store.Latest(); },
          [this, shared](VersionStore::Listing listing) {
            const int64_t listed = listing.latest ? listing.latest->number : step_;
            newest_ = MOERL_MUTANT(hole_future_by_trainer) ? step_ : std::max({newest_, step_, listed});
            const trainer::ExperienceOptions options{.run_id = "simulation",
                                                     .epoch = epoch_,
                                                     .ranks = ranks_,
                                                     .batch_groups = kBatch,
                                                     .num_steps = kSteps,
                                                     .staleness = world.eta,
                                                     .lease_duration_ms = static_cast<int64_t>(kLeaseSeconds * 1000),
                                                     .checkpoints_kept = kKeep,
                                                     .max_new_tokens = 16,
                                                     .vocab_size = int64_t{1} << 31};
            experience_ = std::make_unique<trainer::Experience>(options, std::move(*shared), std::max(step_, listed),
                                                                newest_, ClockMs());
            Tick();
            TryStep();
          });
    });
  };
  world.After(0.3, this, [this, tell_forks, publish, forks = shared->forks] {
    if (!tell_forks) return publish();
    Call<bool>(
        this, [this, forks] { return world.store.RecordForks(epoch_, forks); },
        [this, publish](bool accepted) { accepted ? publish() : Kill(); });
  });
}

void TrainerProcess::Publish(int64_t number, uint64_t root, std::function<void()> next) {
  Call<bool>(
      this, [this, number] { return world.store.Begin(epoch_, number); },
      [this, number, root, next](bool accepted) {
        if (!accepted) return Kill();
        newest_ = std::max(newest_, number);  // from here servers may sample it, answered or not
        if (experience_) experience_->OnVersionSent(number);
        Call<VersionStore::CommitAnswer>(
            this, [this, number, root] { return world.store.Commit(epoch_, number, root); },
            [this, number, root, next](VersionStore::CommitAnswer answer) {
              using Answer = VersionStore::CommitAnswer;
              world.Expect(answer != Answer::kDiverged, "I5", absl::StrCat("version ", number, " had another root"));
              if (answer == Answer::kFenced) return Kill();
              answer == Answer::kOk ? next() : Publish(number, root, next);
            });
      });
}

void TrainerProcess::Tick() {
  const auto before = experience_->leases().deadlines();
  experience_->Advance(ClockMs());
  ReceiveEffects(before);
  if (!Flush()) return;  // an idle fenced trainer must notice too
  world.After(1.0, this, [this] { Tick(); });
}

void TrainerProcess::TryStep() {
  if (step_ == kSteps) return;
  const std::vector<int64_t> batch = experience_->ComposeBatch(step_ + 1);
  ReceiveEffects({});
  if (!Flush()) return;
  world.After(world.Uniform(0.5, 4.0), this, [this, batch] { batch.empty() ? TryStep() : TakeStep(batch); });
}

void TrainerProcess::TakeStep(const std::vector<int64_t>& batch) {
  world.OnTrains(step_ + 1, batch, epoch_);
  if (!world.result.violations.empty()) return;
  std::vector<uint64_t> digests;
  for (int64_t number : batch) {
    digests.push_back(world.DigestOf(experience_->state().groups[static_cast<size_t>(number)]));
  }
  weights_ = World::Train(weights_, digests, ranks_);
  ++step_;
  Publish(step_, weights_, [this] { EndStep(); });
}

void TrainerProcess::EndStep() {
  experience_->OnStepTrained(step_);
  ReceiveEffects({});
  if (!Flush()) return;
  world.trained[step_] = {weights_, ranks_};
  experience_->OnVersionReady(step_);
  const bool is_due = step_ % kCheckpointEvery == 0 || step_ == kSteps;
  world.After(0.3, this, [this, is_due] {
    if (!is_due) return TryStep();
    const int64_t epoch_in_name = MOERL_MUTANT(hole_newest_directory) ? 0 : epoch_;
    world.directories[{step_, epoch_in_name}] = {step_, weights_, experience_->state().HashOfTrained(step_), 0};
    world.After(0.5, this, [this] {
      experience_->OnCheckpointWritten(step_);
      ReceiveEffects({});
      if (Flush()) TryStep();
    });
  });
}

void TrainerProcess::OnMessage(const std::shared_ptr<Stream>& stream, const WorkerMessage& message) {
  if (!experience_) return stream->Cut();  // not serving yet
  streams_[stream->id] = stream;
  const auto before = experience_->leases().deadlines();
  const int64_t now_ms = ClockMs();
  if (const auto* hello = std::get_if<Hello>(&message)) experience_->OnHello(stream->id, *hello, now_ms);
  if (const auto* demand = std::get_if<Demand>(&message)) experience_->OnDemand(stream->id, *demand);
  if (const auto* progress = std::get_if<Progress>(&message)) experience_->OnProgress(stream->id, *progress, now_ms);
  if (const auto* finish = std::get_if<Finish>(&message)) experience_->OnFinish(stream->id, *finish, now_ms);
  if (const auto* back = std::get_if<HandBack>(&message)) experience_->OnHandBack(stream->id, *back);
  if (const auto* renewal = std::get_if<Renewal>(&message)) experience_->OnRenewal(stream->id, *renewal, now_ms);
  ReceiveEffects(before);
}

void TrainerProcess::OnBreak(const std::shared_ptr<Stream>& stream) {
  if (!experience_) return;
  const auto before = experience_->leases().deadlines();
  experience_->OnBreak(stream->id);
  ReceiveEffects(before);
}

// Collects what the state machine wants written and sent; one commit follows for all of it.
void TrainerProcess::ReceiveEffects(const std::map<LeaseId, int64_t>& deadlines_before) {
  bool refused = false;
  for (trainer::Outgoing& outgoing : experience_->TakeMessages()) {
    if (const auto* grant = std::get_if<Grant>(&outgoing.message)) world.group_of_lease[grant->lease_id] = grant->group;
    const auto* ack = std::get_if<Ack>(&outgoing.message);
    if (ack && ack->verdict == Verdict::kRefused) {
      refused = true;
      CheckRefusal(*ack);
    }
    messages_.push_back(std::move(outgoing));
  }
  for (trainer::LedgerWrite& write : experience_->TakeWrites()) {
    if (const auto* end = std::get_if<trainer::EndLease>(&write)) CheckLeaseEnd(end->id, refused, deadlines_before);
    writes_.push_back(std::move(write));
  }
  if (MOERL_MUTANT(bug_ack_before_durable)) SendAll(std::exchange(messages_, {}));
  if (flush_due_ || (writes_.empty() && messages_.empty())) return;
  flush_due_ = true;
  world.After(MOERL_MUTANT(bug_ack_before_durable) ? 4.0 : 0.2, this, [this] {
    flush_due_ = false;
    Flush();
  });
}

bool TrainerProcess::Flush() {
  const auto writes = std::exchange(writes_, {});
  auto messages = std::exchange(messages_, {});
  if (!CommitNow(writes)) return false;
  SendAll(std::move(messages));
  return true;
}

void TrainerProcess::SendAll(std::vector<trainer::Outgoing> messages) {
  for (trainer::Outgoing& outgoing : messages) {
    const auto stream = streams_.at(outgoing.connection);
    if (auto* welcome = std::get_if<Welcome>(&outgoing.message)) stream->ToRollout(std::move(*welcome));
    if (auto* grant = std::get_if<Grant>(&outgoing.message)) stream->ToRollout(std::move(*grant));
    if (auto* ack = std::get_if<Ack>(&outgoing.message)) stream->ToRollout(std::move(*ack));
    if (auto* revocation = std::get_if<Revocation>(&outgoing.message)) stream->ToRollout(std::move(*revocation));
    if (std::holds_alternative<trainer::CloseStream>(outgoing.message)) stream->Cut();
  }
}

// A lease may end by expiry, hand-back, refusal, absence from its worker's Hello, or a newer incarnation.
void TrainerProcess::CheckLeaseEnd(LeaseId id, bool refused, const std::map<LeaseId, int64_t>& deadlines_before) {
  const trainer::Lease& lease = experience_->state().leases.at(id);
  const auto rollout = world.rollouts.find(lease.worker);
  if (refused || rollout == world.rollouts.end() || !deadlines_before.contains(id)) return;
  const RolloutProcess& process = *rollout->second;
  const bool is_working = process.alive && process.incarnation == lease.incarnation && !process.draining &&
                          process.WorksOn(id) && ClockMs() < deadlines_before.at(id);
  world.Expect(!is_working, "I10",
               absl::StrCat("lease ", id.epoch, ".", id.counter, " ended while its server works on it"));
}

// An honest trajectory may only be refused for its lineage.
void TrainerProcess::CheckRefusal(const Ack& ack) {
  ++world.result.counts["refused"];
  const SampleOfLease key{ack.lease_id, ack.sample};
  const trainer::Group& group = experience_->state().groups[static_cast<size_t>(world.group_of_lease[ack.lease_id])];
  const auto& versions = world.reported[key];
  const bool retired = std::any_of(versions.begin(), versions.end(),
                                   [&](VersionName version) { return IsRetired(version, world.ledger.state().forks); });
  world.Expect(
      group.state != trainer::GroupState::kOpen || world.corrupted.contains(key) || retired, "I6",
      absl::StrCat("group ", group.number, " sample ", ack.sample, ": a valid trajectory was refused: ", ack.reason));
}

// ---------------------------------------------------------------------------------------------- rollout server

RolloutProcess::RolloutProcess(World& world, const std::string& name)
    : Process(world, name),
      incarnation(++world.incarnations),
      worker_({.name = name,
               .incarnation = incarnation,
               .num_slots = kLeases * kSamples,
               .numerics_fingerprint = "",
               .progress_every_tokens = 1}) {
  world.After(world.Uniform(0.5, 1.2), this, [this] { Loop(); });
  Watch();
}

void RolloutProcess::Kill() { Process::Kill(); }

bool RolloutProcess::WorksOn(LeaseId id) const {
  for (int64_t i = 0; i < kSamples; ++i) {
    if (worker_.IsRunning(id, i)) return true;
  }
  return false;
}

void RolloutProcess::Watch() {
  Call<VersionStore::Listing>(
      this, [this] { return world.store.Latest(); },
      [this](VersionStore::Listing listing) {
        worker_.OnListing(listing.latest, listing.forks);
        if (worker_.VersionToChangeTo()) {  // between two tokens, whole; downwards too
          worker_.OnVersionChanged(*listing.latest);
          root_ = listing.root;
        }
        world.After(world.Uniform(1.0, 3.0), this, [this] { Watch(); });
      });
}

void RolloutProcess::Connect() {
  std::vector<TrainerProcess*> live;
  for (const auto& process : world.trainers) {
    if (process->alive && !process->paused) live.push_back(process.get());
  }
  if (live.empty()) return;
  TrainerProcess* trainer = live[world.rng() % live.size()];  // it may well find a zombie
  stream_ = std::make_shared<Stream>(world, this, trainer, static_cast<uint64_t>(++world.num_streams));
  world.streams.push_back(stream_);
  stream_->ToTrainer(worker_.OnStreamOpened());
}

void RolloutProcess::Loop() {
  if (draining) worker_.Drain();
  if (!stream_ || !stream_->open) {
    worker_.OnStreamBroken();
    Connect();
  }
  Decode();
  if (stream_ && stream_->open) {
    for (WorkerMessage& message : worker_.TakeMessages(ClockMs())) {
      auto* finish = std::get_if<Finish>(&message);
      if (finish && world.corrupted.contains({finish->lease_id, finish->sample})) finish->digest ^= 1;
      stream_->ToTrainer(std::move(message));
    }
    worker_.TakeCommands();
  }
  if (worker_.IsDrained()) {
    world.After(2.0, this, [this] { Kill(); });
    return;
  }
  world.After(world.Uniform(0.5, 1.2) * rate, this, [this] { Loop(); });
}

// One token for every running sample whose lease the weights at hand satisfy.
void RolloutProcess::Decode() {
  for (const auto& [id, lease] : held_) {
    for (int64_t i = 0; i < kSamples; ++i) {
      if (!worker_.IsRunning(id, i) || !worker_.MaySample(id)) continue;
      const int64_t length = world.LengthOf(lease.group, i);
      if (static_cast<int64_t>(worker_.TokensOf(id, i).size()) < length) {
        const VersionName version = *worker_.running_version();
        world.Expect(version.number >= lease.min_version, "I3", "sampled below the lease's lowest version");
        rl::TokenRun token;
        token.ids = {world.TokenOf(lease.group, i, worker_.TokensOf(id, i).ids, root_)};
        token.logprobs = {-1.0f};
        token.versions = {version};
        token.trainable = {1};
        worker_.OnTokens(id, i, token);
      }
      if (static_cast<int64_t>(worker_.TokensOf(id, i).size()) < length) continue;
      world.reported[{id, i}] = worker_.TokensOf(id, i).versions;
      if (world.faulty && world.Chance(0.01)) world.corrupted.insert({id, i});
      // At eta 0 rewards are a function of the sample.
      const bool fails = world.RewardFails(lease.group, i) || (world.eta > 0 && world.Chance(0.06));
      std::variant<double, Failure> outcome = 1.0;
      if (fails) outcome = Failure{FailureReason::kVerifierError, "no answer"};
      worker_.OnOutcome(id, i, FinishReason::kStop, std::move(outcome));
    }
  }
}

void RolloutProcess::OnMessage(const std::shared_ptr<Stream>& stream, const TrainerMessage& message) {
  if (stream != stream_) return;
  if (const auto* welcome = std::get_if<Welcome>(&message)) {
    if (!worker_.OnWelcome(*welcome, ClockMs()).ok()) stream->Cut();
  }
  if (const auto* grant = std::get_if<Grant>(&message)) {
    held_[grant->lease_id] = {grant->group, grant->min_version};
    worker_.OnGrant(*grant, ClockMs());
  }
  if (const auto* ack = std::get_if<Ack>(&message)) {
    const trainer::Group& group = world.ledger.state().groups[static_cast<size_t>(world.group_of_lease[ack->lease_id])];
    const bool is_durable =
        group.state == trainer::GroupState::kDropped || group.finished[static_cast<size_t>(ack->sample)];
    world.Expect(is_durable || ack->verdict == Verdict::kRefused, "I6",
                 absl::StrCat("group ", group.number, " sample ", ack->sample, " acknowledged, not on disk"));
    worker_.OnAck(*ack);
  }
  if (const auto* revocation = std::get_if<Revocation>(&message)) worker_.OnRevocation(*revocation);
}

}  // namespace moerl::protocol_test
