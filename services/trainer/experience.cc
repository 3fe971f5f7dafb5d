#include "services/trainer/experience.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"
#include "libs/base/status_macros.h"
#include "libs/experience/mutant.h"
#include "services/trainer/admission.h"

namespace moerl::trainer {

Experience::Experience(ExperienceOptions options, LedgerState state, int64_t ready, int64_t newest, int64_t now_ms)
    : options_(std::move(options)),
      state_(std::move(state)),
      table_(options_.lease_duration_ms),
      ready_(ready),
      newest_(newest) {
  MOERL_CHECK(options_.batch_groups > 0 && state_.group_size > 0);
  for (const Group& group : state_.groups) {
    if (group.state == GroupState::kDropped) ++counters_.dropped[group.reason];
    if (group.state != GroupState::kOpen) continue;
    open_.insert(group.number);
    if (group.lease) table_.Add(*group.lease, now_ms);
  }
}

void Experience::Write(LedgerWrite write) {
  if (const auto* drop = std::get_if<DropGroup>(&write)) ++counters_.dropped[drop->reason];
  state_.Apply(write);
  writes_.push_back(std::move(write));
}

void Experience::Send(ConnectionId connection, std::variant<Welcome, Grant, Ack, Revocation, CloseStream> message) {
  messages_.push_back({connection, std::move(message)});
}

const Experience::Connection* Experience::ConnectionOf(LeaseId id) const {
  const auto lease = state_.leases.find(id);
  if (lease == state_.leases.end()) return nullptr;
  const auto connection = connections_.find(lease->second.worker);
  return connection == connections_.end() ? nullptr : &connection->second;
}

// ---------------------------------------------------------------------------------------------- connections

void Experience::OnHello(ConnectionId connection, const Hello& hello, int64_t now_ms) {
  const std::pair<int64_t, int64_t> order{hello.incarnation, hello.hello_number};
  const auto last = hellos_.find(hello.worker);
  if (last != hellos_.end() && order <= last->second && !MOERL_MUTANT(hole_stale_hello)) {
    Send(connection, CloseStream{});  // read late, from a stream already replaced
    return;
  }
  hellos_[hello.worker] = order;
  const auto current = connections_.find(hello.worker);
  if (current != connections_.end() && current->second.id != connection) Send(current->second.id, CloseStream{});
  connections_[hello.worker] = {connection, hello.num_slots, hello.num_slots, hello.version};

  const std::set<LeaseId> held(hello.leases_held.begin(), hello.leases_held.end());
  for (const auto& [id, deadline_ms] : std::map(table_.deadlines())) {
    const Lease& lease = state_.leases.at(id);
    if (lease.worker != hello.worker) continue;
    // Of an earlier incarnation, or a grant that never arrived.
    if (lease.incarnation != hello.incarnation || !held.contains(id)) End(id, "");
  }
  Welcome welcome{options_.run_id, options_.epoch, state_.forks, {}, hello.hello_number};
  for (LeaseId id : held) {
    const bool is_adopted = table_.IsLive(id) && state_.leases.at(id).worker == hello.worker;
    if (is_adopted) table_.Renew(id, now_ms);
    welcome.decisions.push_back(Decide(id, is_adopted));
  }
  Send(connection, std::move(welcome));
}

LeaseDecision Experience::Decide(LeaseId id, bool is_adopted) const {
  LeaseDecision decision{id, is_adopted, options_.lease_duration_ms, {}, {}};
  if (!is_adopted) return decision;
  const Group& group = GroupAt(state_.leases.at(id).group);
  for (int64_t i = 0; i < state_.group_size; ++i) {
    decision.lengths.push_back(LengthSoFar(id, i));
    decision.are_final.push_back(group.finished[static_cast<size_t>(i)]);
  }
  return decision;
}

void Experience::OnBreak(ConnectionId connection) {
  const auto it = std::find_if(connections_.begin(), connections_.end(),
                               [&](const auto& entry) { return entry.second.id == connection; });
  if (it == connections_.end()) return;
  if (MOERL_MUTANT(bug_break_ends_lease)) {
    for (const auto& [id, deadline_ms] : std::map(table_.deadlines())) {
      if (state_.leases.at(id).worker == it->first) End(id, "");
    }
  }
  connections_.erase(it);
}

void Experience::OnDemand(ConnectionId connection, const Demand& demand) {
  for (auto& [worker, entry] : connections_) {
    if (entry.id != connection) continue;
    entry.demand = demand.num_samples;
    entry.version = demand.version;
  }
}

void Experience::OnRenewal(ConnectionId connection, const Renewal& renewal, int64_t now_ms) {
  for (LeaseId id : renewal.lease_ids) {
    if (!table_.Renew(id, now_ms)) Send(connection, Revocation{id, "the lease is over"});
  }
}

void Experience::OnHandBack(ConnectionId, const HandBack& hand_back) {
  if (table_.IsLive(hand_back.lease_id)) End(hand_back.lease_id, "");
}

std::map<std::string, WorkerView> Experience::Workers() const {
  std::map<std::string, WorkerView> workers;
  for (const auto& [id, deadline_ms] : table_.deadlines()) ++workers[state_.leases.at(id).worker].num_leases;
  for (const auto& [worker, connection] : connections_) {
    WorkerView& view = workers[worker];
    view.is_connected = true;
    view.num_slots = connection.num_slots;
    view.version = connection.version;
  }
  return workers;
}

std::map<ConnectionId, std::string> Experience::ConnectedWorkers() const {
  std::map<ConnectionId, std::string> workers;
  for (const auto& [worker, connection] : connections_) workers[connection.id] = worker;
  return workers;
}

// ---------------------------------------------------------------------------------------------- trajectories

int64_t Experience::LengthSoFar(LeaseId id, int64_t sample) const {
  const TokenRunPtr& prefix = state_.leases.at(id).prefixes[static_cast<size_t>(sample)];
  const auto part = parts_.find(PartKey{id, sample});
  return static_cast<int64_t>((prefix ? prefix->size() : 0) + (part == parts_.end() ? 0 : part->second.size()));
}

rl::TokenRun Experience::SoFar(LeaseId id, int64_t sample) const {
  const TokenRunPtr& prefix = state_.leases.at(id).prefixes[static_cast<size_t>(sample)];
  rl::TokenRun tokens = prefix ? *prefix : rl::TokenRun{};
  const auto part = parts_.find(PartKey{id, sample});
  if (part != parts_.end()) tokens.Append(part->second);
  return tokens;
}

// What the model would refuse must not get into a batch: a recorded batch is replayed until it is trained.
absl::Status Experience::CheckTokens(const rl::TokenRun& tokens) const {
  rl::RouteShape routes = options_.token_routes;
  MOERL_RETURN_IF_ERROR(tokens.Validate(options_.vocab_size, routes.num_bytes()));
  if (routes.num_bytes() == 0) return absl::OkStatus();
  routes.num_tokens = static_cast<int64_t>(tokens.size());
  return rl::CheckRoutes(routes, tokens.routes);
}

absl::Status Experience::AddPart(LeaseId id, int64_t sample, int64_t offset, const rl::TokenRun& tokens) {
  MOERL_RETURN_IF_ERROR(CheckTokens(tokens));
  int64_t have = LengthSoFar(id, sample);
  if (MOERL_MUTANT(hole_no_offset)) have = offset;
  const auto num_tokens = static_cast<int64_t>(tokens.size());
  if (offset > have || offset + num_tokens <= have) return absl::OkStatus();  // a gap, or nothing new
  if (offset + num_tokens > options_.max_new_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("trajectory: ", offset + num_tokens, " tokens, the budget is ", options_.max_new_tokens));
  }
  rl::TokenRun& part = parts_[PartKey{id, sample}];
  const rl::TokenRun next = tokens.Slice(static_cast<size_t>(have - offset), tokens.size());
  const TokenRunPtr& prefix = state_.leases.at(id).prefixes[static_cast<size_t>(sample)];
  const rl::TokenRun* before = !part.empty() ? &part : prefix && !prefix->empty() ? prefix.get() : nullptr;
  if (before && before->kept_counts.empty() != next.kept_counts.empty()) {
    return absl::InvalidArgumentError("trajectory: kept ids are given for some tokens and not for others");
  }
  part.Append(next);
  return absl::OkStatus();
}

void Experience::OnProgress(ConnectionId connection, const Progress& progress, int64_t now_ms) {
  const auto lease = state_.leases.find(progress.lease_id);
  if (lease == state_.leases.end()) return;  // its group is decided: nothing is continued from it
  table_.Renew(progress.lease_id, now_ms);
  if (progress.sample < 0 || progress.sample >= state_.group_size) return;
  const absl::Status status = AddPart(progress.lease_id, progress.sample, progress.offset, progress.tokens);
  if (!status.ok()) Refuse(connection, progress.lease_id, progress.sample, status);
}

void Experience::OnMalformed(ConnectionId connection, LeaseId lease_id, int64_t sample, const absl::Status& why) {
  Refuse(connection, lease_id, sample, why);
}

void Experience::OnFinish(ConnectionId connection, const Finish& finish, int64_t now_ms) {
  const auto lease = state_.leases.find(finish.lease_id);
  if (lease == state_.leases.end()) return AnswerUnknownLease(connection, finish);
  table_.Renew(finish.lease_id, now_ms);
  if (finish.sample < 0 || finish.sample >= state_.group_size) {
    return Refuse(connection, finish.lease_id, finish.sample,
                  absl::InvalidArgumentError(
                      absl::StrCat("sample index ", finish.sample, " is outside the group of ", state_.group_size)));
  }
  const Group& group = GroupAt(lease->second.group);
  if (group.finished[static_cast<size_t>(finish.sample)] && !MOERL_MUTANT(bug_duplicate_wins)) {
    return Acknowledge(connection, finish, Verdict::kSuperseded);
  }
  if (const Failure* failure = std::get_if<Failure>(&finish.outcome)) return Fail(connection, finish, *failure);

  absl::Status status = AddPart(finish.lease_id, finish.sample, finish.offset, finish.tokens);
  rl::TokenRun tokens = SoFar(finish.lease_id, finish.sample);
  if (status.ok()) status = Judge(finish, group, tokens);
  if (!status.ok()) return Refuse(connection, finish.lease_id, finish.sample, status);
  Finished(connection, finish, std::move(tokens));
}

// A lease is forgotten when its group is decided, so one that was granted once needs no judgement.
void Experience::AnswerUnknownLease(ConnectionId connection, const Finish& finish) {
  const LeaseId id = finish.lease_id;
  const bool was_granted = id.epoch > 0 && id.counter > 0 &&
                           (id.epoch < options_.epoch || (id.epoch == options_.epoch && id.counter <= lease_counter_));
  if (was_granted) return Acknowledge(connection, finish, Verdict::kSuperseded);
  CountRefused("unknown lease");
  Send(connection, Ack{id, finish.sample, Verdict::kRefused,
                       absl::StrCat("lease ", id.epoch, ".", id.counter, " was never granted")});
}

absl::Status Experience::Judge(const Finish& finish, const Group& group, const rl::TokenRun& tokens) const {
  if (finish.num_tokens <= 0 || static_cast<int64_t>(tokens.size()) != finish.num_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("wrong length: ", finish.num_tokens, " tokens announced, ", tokens.size(), " reported"));
  }
  if (tokens.IdsDigest() != finish.digest) {
    return absl::DataLossError("wrong digest: the reported ids are not the announced ones");
  }
  if (!std::isfinite(std::get<double>(finish.outcome))) {
    return absl::InvalidArgumentError("reward is not a finite number");
  }
  const int64_t newest = MOERL_MUTANT(hole_future_by_answer) ? ready_ : newest_;
  const int64_t lowest = MinVersion(group);
  for (VersionName version : tokens.versions) {
    const std::string name = absl::StrCat("version ", version.number, " of epoch ", version.epoch);
    if (IsRetired(version, state_.forks) && !MOERL_MUTANT(hole_version_number_only)) {
      return absl::FailedPreconditionError(absl::StrCat("retired version: ", name, " left the lineage"));
    }
    if (version.number > newest) {
      return absl::InvalidArgumentError(absl::StrCat("future version: ", name, ", the newest is ", newest));
    }
    if (version.number < lowest && !MOERL_MUTANT(bug_no_min_version)) {
      return absl::InvalidArgumentError(absl::StrCat("stale version: ", name, ", the lowest allowed is ", lowest));
    }
  }
  return absl::OkStatus();
}

void Experience::Acknowledge(ConnectionId connection, const Finish& finish, Verdict verdict, std::string reason) {
  if (verdict == Verdict::kRecorded) ++counters_.recorded;
  if (verdict == Verdict::kSuperseded) ++counters_.superseded;
  Send(connection, Ack{finish.lease_id, finish.sample, verdict, std::move(reason)});
}

// A rule whose name holds what a worker sent must not grow the map without end.
void Experience::CountRefused(const std::string& rule) {
  constexpr size_t kRulesMax = 64;
  const bool is_counted_alone = counters_.refused.size() < kRulesMax || counters_.refused.count(rule) > 0;
  ++counters_.refused[is_counted_alone ? rule : "other"];
}

// Its parts are not continued from: what they hold was not trustworthy. The durable prefix still is.
void Experience::Refuse(ConnectionId connection, LeaseId id, int64_t sample, const absl::Status& why) {
  const std::string reason(why.message());
  CountRefused(reason.substr(0, reason.find(':', reason.find("trajectory: ") == 0 ? 12 : 0)));
  parts_.erase(PartKey{id, sample});
  Send(connection, Ack{id, sample, Verdict::kRefused, reason});
  if (table_.IsLive(id) && !MOERL_MUTANT(hole_refused_keeps_lease)) End(id, "");
}

void Experience::Fail(ConnectionId connection, const Finish& finish, const Failure& failure) {
  ++counters_.failed;
  const int64_t number = state_.leases.at(finish.lease_id).group;
  RecordOutcome(connection, finish, DropGroup{number, DropReason::kVerifier, failure.detail});
}

void Experience::Finished(ConnectionId connection, const Finish& finish, rl::TokenRun tokens) {
  const int64_t number = state_.leases.at(finish.lease_id).group;
  Trajectory trajectory{std::move(tokens), std::get<double>(finish.outcome), finish.reason};
  RecordOutcome(connection, finish,
                PutOutcome{number, finish.sample, std::make_shared<const Trajectory>(std::move(trajectory))});
}

// The ledger forgets the leases of a group that is decided; whoever else works on it is told to stop.
void Experience::RecordOutcome(ConnectionId connection, const Finish& finish, LedgerWrite outcome) {
  const int64_t number = state_.leases.at(finish.lease_id).group;
  std::map<LeaseId, const Connection*> live;
  for (const auto& [id, deadline_ms] : table_.deadlines()) {
    if (state_.leases.at(id).group == number) live[id] = ConnectionOf(id);
  }
  Write(std::move(outcome));
  Acknowledge(connection, finish, Verdict::kRecorded);
  if (GroupAt(number).state == GroupState::kOpen) return;

  open_.erase(number);
  for (const auto& [id, worker] : live) {
    table_.Remove(id);
    const bool worker_knows = id == finish.lease_id && GroupAt(number).state == GroupState::kFinished;
    if (worker && !worker_knows) Send(worker->id, Revocation{id, "its group is decided"});
  }
  std::erase_if(parts_, [&](const auto& entry) { return !state_.leases.contains(entry.first.first); });
}

// ---------------------------------------------------------------------------------------------- leases

void Experience::End(LeaseId id, const std::string& reason_to_say) {
  const Connection* connection = ConnectionOf(id);
  if (connection && !reason_to_say.empty()) Send(connection->id, Revocation{id, reason_to_say});
  Write(EndLease{id});
  table_.Remove(id);
}

void Experience::Advance(int64_t now_ms) {
  for (LeaseId id : table_.Expired(now_ms)) {
    ++counters_.leases_expired;
    End(id, "the lease expired");
  }
  Admit();
  GrantAll(now_ms);
}

void Experience::Admit() {
  if (!admission_open_) return;
  int64_t slots = 0;
  for (const auto& [worker, connection] : connections_) slots += connection.num_slots;
  slots /= state_.group_size;
  if (options_.group_slots_max > 0) slots = std::min(slots, options_.group_slots_max);
  int64_t count = NumAdmissible(state_, slots - static_cast<int64_t>(open_.size()), options_.staleness, ready_,
                                options_.num_steps, options_.batch_groups);
  for (; count > 0; --count) {
    Write(AdmitGroup{options_.staleness});
    open_.insert(state_.groups.back().number);
  }
}

int64_t Experience::MinVersion(const Group& group) const {
  return MinimumVersion(state_, group, options_.batch_groups);
}

void Experience::GrantAll(int64_t now_ms) {
  std::map<std::string, int64_t> held;  // unfinished samples by worker
  std::vector<int64_t> waiting;
  for (int64_t number : open_) {
    const Group& group = GroupAt(number);
    if (!group.lease) {
      waiting.push_back(number);
    } else {
      held[state_.leases.at(*group.lease).worker] += std::count(group.finished.begin(), group.finished.end(), false);
    }
  }
  for (int64_t number : waiting) {
    const Group& group = GroupAt(number);
    const int64_t needed = std::count(group.finished.begin(), group.finished.end(), false);
    std::string best;
    int64_t best_free = 0;
    for (const auto& [worker, connection] : connections_) {
      const int64_t free = std::min(connection.num_slots - held[worker], connection.demand);
      const bool fits = free >= needed || (held[worker] == 0 && free > 0);
      if (fits && free > best_free) {
        best = worker;
        best_free = free;
      }
    }
    if (best_free == 0) continue;
    GrantTo(best, connections_[best], number, now_ms);
    held[best] += needed;
  }
}

void Experience::GrantTo(const std::string& worker, Connection& connection, int64_t number, int64_t now_ms) {
  const Group& group = GroupAt(number);
  const LeaseId id{options_.epoch, ++lease_counter_};
  Lease lease{id, number, worker, hellos_.at(worker).first, {}};
  Grant grant{id, number, group.prompt_index, options_.lease_duration_ms, MinVersion(group), {}};
  for (int64_t i = 0; i < state_.group_size; ++i) {
    const bool is_final = group.finished[static_cast<size_t>(i)];
    TokenRunPtr prefix;
    if (!is_final && group.last_lease) {
      rl::TokenRun tokens = SoFar(*group.last_lease, i);
      const auto retired = std::find_if(tokens.versions.begin(), tokens.versions.end(),
                                        [&](VersionName version) { return IsRetired(version, state_.forks); });
      const auto cut =
          MOERL_MUTANT(hole_retired_prefix) ? tokens.size() : static_cast<size_t>(retired - tokens.versions.begin());
      if (cut > 0) prefix = std::make_shared<const rl::TokenRun>(tokens.Slice(0, cut));
    }
    lease.prefixes.push_back(prefix);
    grant.samples.push_back({is_final, std::move(prefix)});
    connection.demand -= is_final ? 0 : 1;
  }
  Write(PutLease{std::move(lease)});
  table_.Add(id, now_ms);
  Send(connection.id, std::move(grant));
}

// ---------------------------------------------------------------------------------------------- steps

std::vector<int64_t> Experience::ComposeBatch(int64_t step) {
  const auto recorded = state_.batches.find(step);
  if (recorded != state_.batches.end()) return recorded->second.groups;
  if (options_.dynamic_sampling.enabled) DropGroupsWithoutSignal(step);
  std::vector<int64_t> groups = NextBatch(state_, step, options_.batch_groups);
  if (!groups.empty()) Write(RecordBatch{step, {groups, options_.ranks}});
  return groups;
}

// In number order, up to the first group that is not finished: the same verdicts after a restart.
void Experience::DropGroupsWithoutSignal(int64_t step) {
  const auto before = state_.batches.find(step - 1);
  const int64_t last_trained = before == state_.batches.end() ? -1 : before->second.groups.back();
  const auto is_refill = [&](int64_t number) {
    return number > last_trained && GroupAt(number).reason == DropReason::kNoSignal;
  };
  for (int64_t i = 0; i < options_.batch_groups;) {
    const int64_t number = state_.NumberAt((step - 1) * options_.batch_groups + i);
    if (number < 0 || GroupAt(number).state != GroupState::kFinished) return;
    std::vector<double> rewards;
    for (const TrajectoryPtr& sample : GroupAt(number).samples) rewards.push_back(sample->reward);
    const int64_t num_dropped = std::count_if(state_.dropped.begin(), state_.dropped.end(), is_refill);
    if (rl::JudgeGroup(options_.dynamic_sampling, rewards, options_.batch_groups, num_dropped) ==
        rl::GroupVerdict::kDropAndRefill) {
      Write(DropGroup{number, DropReason::kNoSignal, "its rewards are all equal"});
    } else {
      ++i;
    }
  }
}

void Experience::OnStepTrained(int64_t step) { Write(MarkTrained{step}); }

void Experience::OnCheckpointWritten(int64_t step) {
  Write(NameCheckpoint{{step, options_.epoch}, options_.checkpoints_kept});
  Write(ForgetPayloads{state_.checkpoints.front().step});
}

void Experience::OnVersionSent(int64_t number) { newest_ = std::max(newest_, number); }

void Experience::OnVersionReady(int64_t number) {
  ready_ = std::max(ready_, number);
  newest_ = std::max(newest_, number);
}

}  // namespace moerl::trainer
