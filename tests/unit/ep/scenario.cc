#include "tests/unit/ep/scenario.h"

#include <cstring>
#include <memory>
#include <set>

#include "absl/strings/str_cat.h"
#include "libs/ep/fp8.h"
#include "libs/fabric/chaos_transport.h"
#include "libs/fabric/in_process_fabric.h"
#include "tests/unit/ep/oracle.h"
#include "tests/unit/ep/program.h"

namespace moerl::ep {
namespace {

// The stand-in for an expert: what it computes matters little, that it differs from expert to expert does.
float ExpertOf(int expert, float x) { return x * (0.37f * expert + 1.0f) + 0.01f * expert; }

// One rank's progress through one buffer's program, and what came out.
struct Runner {
  struct Output {
    bool is_posted = false, is_done = false;
    Ticket ticket;
    Dispatched dispatched;
    std::vector<float> rows, rows_scalars;  // what the experts made of it
    std::vector<uint16_t> rows_bf16;
    std::vector<float> out, scalars_out;
  };
  int rank = 0;
  std::unique_ptr<Buffer> buffer;
  std::vector<Output> outputs;
  size_t next = 0;
  int num_open = 0;
};

float RowValue(const Dispatched& d, const Step& step, int64_t row, int column, int hidden) {
  const std::byte* at = d.x + row * d.row_bytes;
  if (step.to_fp8) {
    float scale;
    std::memcpy(&scale, at + hidden + column / kFp8Block * 4, sizeof(scale));
    return FloatFromFp8(std::to_integer<uint8_t>(at[column])) * scale;
  }
  if (step.type == RowType::kFp32) return reinterpret_cast<const float*>(at)[column];
  return FloatFromBf16(reinterpret_cast<const uint16_t*>(at)[column]);
}

// A dispatched row goes through its expert; the scalar that goes back is a function of row and expert.
void RunExperts(const ScenarioConfig& c, const Step& step, const std::vector<int>& experts, Runner::Output* output) {
  const Dispatched& d = output->dispatched;
  output->rows.resize(d.num_rows * c.hidden);
  output->rows_bf16.resize(output->rows.size());
  output->rows_scalars.resize(d.num_rows);
  for (size_t e = 0; e < experts.size(); ++e) {
    for (int64_t row = d.offsets[e]; row < d.offsets[e + 1]; ++row) {
      for (int i = 0; i < c.hidden; ++i) {
        const float y = ExpertOf(experts[e], RowValue(d, step, row, i, c.hidden));
        output->rows[row * c.hidden + i] = y;
        output->rows_bf16[row * c.hidden + i] = Bf16FromFloat(y);
      }
      output->rows_scalars[row] = output->rows[row * c.hidden] + experts[e];
    }
  }
}

class World {
 public:
  World(const ScenarioConfig& config, uint64_t program_seed, uint64_t schedule_seed)
      : c_(config), random_(schedule_seed), ranks_(static_cast<int>(config.node_of.size())) {
    Random program_random(program_seed);
    for (int b = 0; b < c_.num_buffers; ++b) programs_.push_back(DrawProgram(c_, program_random));
  }

  absl::Status Open() {
    fabric::InProcessFabric fabric({.epoch = 7, .node_of = c_.node_of, .completion_capacity = size_t{1} << 22});
    if (c_.has_chaos) {
      fabric.set_decorator([this](int rank, std::unique_ptr<fabric::Transport> base) {
        fabric::ChaosTransport::Options options;
        options.seed = random_();
        options.hold_percent = c_.hold_percent;
        if (c_.is_queue_exact) options.completion_capacity = 2 * SlotsOf(rank);
        auto chaos = std::make_unique<fabric::ChaosTransport>(std::move(base), options);
        chaos_.push_back(chaos.get());
        return chaos;
      });
    }
    Group::Options group_options;
    group_options.progress_thread = false;
    for (int rank = 0; rank < ranks_; ++rank) {
      groups_.push_back(std::make_unique<Group>(fabric.Open(rank), group_options));
    }
    runners_.resize(c_.num_buffers);
    for (int b = 0; b < c_.num_buffers; ++b) {
      std::vector<std::string> offers;
      for (int rank = 0; rank < ranks_; ++rank) {
        absl::StatusOr<ExpertMap> map = ExpertMap::Create(groups_[rank]->membership(), c_.owner);
        if (!map.ok()) return map.status();
        absl::StatusOr<std::unique_ptr<Buffer>> buffer = Buffer::Open(groups_[rank].get(), *map, c_.options);
        if (!buffer.ok()) return buffer.status();
        Runner runner;
        runner.rank = rank;
        runner.buffer = *std::move(buffer);
        runner.outputs.resize(programs_[b].steps.size());
        offers.push_back(runner.buffer->Offer());
        runners_[b].push_back(std::move(runner));
      }
      for (Runner& runner : runners_[b]) {
        if (absl::Status status = runner.buffer->Connect(offers); !status.ok()) return status;
      }
    }
    return absl::OkStatus();
  }

  absl::Status Run(uint64_t* steps) {
    constexpr uint64_t kQuietMax = 4000;
    uint64_t quiet = 0;
    std::vector<bool> slow(ranks_);
    for (const int rank : c_.slow) slow[rank] = true;
    while (true) {
      ++*steps;
      const int rank = Draw(random_, 0, ranks_ - 1);
      if (slow[rank] && !Chance(random_, 0.03)) continue;
      bool moved = groups_[rank]->hub().Progress();
      if (!groups_[rank]->hub().failure().ok()) return groups_[rank]->hub().failure();
      for (int b = 0; b < c_.num_buffers; ++b) {
        absl::StatusOr<bool> advanced = Advance(b, runners_[b][rank]);
        if (!advanced.ok()) return advanced.status();
        moved |= *advanced;
      }
      quiet = moved ? 0 : quiet + 1;
      if (*steps % 16 == 0 && IsFinished()) return absl::OkStatus();
      if (quiet > kQuietMax * ranks_) return absl::DeadlineExceededError(absl::StrCat("deadlock: ", Stuck()));
    }
  }

  absl::Status Quiesce() {
    for (int i = 0; i < 20000 * ranks_; ++i) {
      if (i % ranks_ == 0) {
        bool is_quiet = true;
        for (auto& of_buffer : runners_) {
          for (Runner& runner : of_buffer) is_quiet &= runner.buffer->is_quiet();
        }
        if (is_quiet) return absl::OkStatus();
      }
      groups_[i % ranks_]->hub().Progress();
      if (!groups_[i % ranks_]->hub().failure().ok()) return groups_[i % ranks_]->hub().failure();
    }
    return absl::InternalError("a credit did not come home");
  }

  absl::Status Check() {
    uint64_t rows = 0, partials = 0;
    for (int b = 0; b < c_.num_buffers; ++b) {
      const Program& program = programs_[b];
      for (size_t s = 0; s < program.steps.size(); ++s) {
        const absl::Status status =
            program.steps[s].kind == Step::kCombine ? CheckCombine(b, s, &partials) : CheckDispatch(b, s, &rows);
        if (!status.ok()) return status;
      }
    }
    uint64_t crossed_rows = 0, crossed_partials = 0;
    for (auto& of_buffer : runners_) {
      for (Runner& runner : of_buffer) {
        crossed_rows += runner.buffer->stats().rows;
        crossed_partials += runner.buffer->stats().partials;
      }
    }
    if (rows != crossed_rows) return Wrong(absl::StrCat(crossed_rows, " rows crossed, the minimum is ", rows));
    if (partials != crossed_partials) {
      return Wrong(absl::StrCat(crossed_partials, " partials crossed, the minimum is ", partials));
    }
    return absl::OkStatus();
  }

  uint64_t Digest() const {
    uint64_t hash = 0xcbf29ce484222325u;
    const auto add = [&hash](const void* data, size_t bytes) {
      const unsigned char* at = static_cast<const unsigned char*>(data);
      for (size_t i = 0; i < bytes; ++i) hash = (hash ^ at[i]) * 0x100000001b3u;
    };
    for (const auto& of_buffer : runners_) {
      for (const Runner& runner : of_buffer) {
        for (const Runner::Output& output : runner.outputs) {
          add(output.dispatched.x, output.dispatched.num_rows * output.dispatched.row_bytes);
          add(output.out.data(), output.out.size() * sizeof(float));
          add(output.scalars_out.data(), output.scalars_out.size() * sizeof(float));
        }
      }
    }
    return hash;
  }

 private:
  static absl::Status Wrong(std::string what) { return absl::DataLossError(what); }

  // Posts the next step when it may be, and receives what is done. True when either happened.
  absl::StatusOr<bool> Advance(int b, Runner& runner) {
    const Program& program = programs_[b];
    bool moved = false;
    if (runner.next < program.steps.size() && runner.num_open < c_.window && Chance(random_, 0.3)) {
      const Step& step = program.steps[runner.next];
      const bool is_free = step.kind == Step::kDispatch || runner.outputs[step.from].is_done;
      if (is_free) {
        absl::Status status = PostStep(b, runner, runner.next);
        if (!status.ok()) return status;
        ++runner.next;
        ++runner.num_open;
        moved = true;
      }
    }
    for (size_t s = 0; s < runner.next; ++s) {
      Runner::Output& output = runner.outputs[s];
      if (output.is_done || !runner.buffer->IsDone(output.ticket)) continue;
      if (program.steps[s].kind == Step::kCombine) {
        if (absl::Status status = runner.buffer->ReceiveCombine(output.ticket); !status.ok()) return status;
      } else {
        absl::StatusOr<Dispatched> dispatched = runner.buffer->ReceiveDispatch(output.ticket);
        if (!dispatched.ok()) return dispatched.status();
        output.dispatched = *std::move(dispatched);
        RunExperts(c_, program.steps[s], runner.buffer->map().experts_of_rank(runner.rank), &output);
      }
      output.is_done = moved = true;
      --runner.num_open;
    }
    return moved;
  }

  absl::Status PostStep(int b, Runner& runner, size_t s) {
    const Step& step = programs_[b].steps[s];
    Runner::Output& output = runner.outputs[s];
    absl::StatusOr<Ticket> ticket;
    if (step.kind == Step::kCombine) {
      const Runner::Output& from = runner.outputs[step.from];
      const Tokens& tokens = programs_[b].tokens[step.route][runner.rank];
      output.out.assign(static_cast<size_t>(tokens.count) * c_.hidden, -7.0f);
      CombineInput input;
      input.handle = from.dispatched.handle;
      input.rows = step.rows_bf16 ? static_cast<const void*>(from.rows_bf16.data()) : from.rows.data();
      input.type = step.rows_bf16 ? RowType::kBf16 : RowType::kFp32;
      input.is_weighted = step.is_weighted;
      input.wire_block = c_.wire_block;
      input.out = output.out.data();
      if (step.has_scalars) {
        output.scalars_out.assign(tokens.ids.size(), -7.0f);
        input.has_scalars = true;
        input.scalars = from.rows_scalars.data();
        input.scalars_out = output.scalars_out.data();
      }
      ticket = runner.buffer->SendCombine(input);
    } else {
      const Tokens& tokens = programs_[b].tokens[s][runner.rank];
      const void* x = step.type == RowType::kFp32 ? static_cast<const void*>(tokens.x.data()) : tokens.x_bf16.data();
      if (step.kind == Step::kRepeat) {
        ticket = runner.buffer->SendDispatch(runner.outputs[step.from].dispatched.handle, x, step.type, step.to_fp8);
      } else {
        ticket = runner.buffer->SendDispatch(
            {x, step.type, step.to_fp8, tokens.count, c_.top_k, tokens.ids.data(), tokens.weights.data()});
      }
    }
    if (!ticket.ok()) return ticket.status();
    output.ticket = *ticket;
    output.is_posted = true;
    return absl::OkStatus();
  }

  absl::Status CheckDispatch(int b, size_t s, uint64_t* rows) {
    const Step& step = programs_[b].steps[s];
    const std::vector<Tokens>& all = programs_[b].tokens[s];
    for (Runner& runner : runners_[b]) {
      const Dispatched& got = runner.outputs[s].dispatched;
      int64_t row = 0;
      const std::vector<int>& experts = runner.buffer->map().experts_of_rank(runner.rank);
      for (size_t e = 0; e < experts.size(); ++e) {
        if (got.offsets[e] != row) return Wrong(absl::StrCat("offsets of rank ", runner.rank, " step ", s));
        for (int source = 0; source < ranks_; ++source) {
          const Tokens& tokens = all[source];
          for (int t = 0; t < tokens.count; ++t) {
            for (int j = 0; j < c_.top_k; ++j) {
              if (tokens.ids[t * c_.top_k + j] != experts[e]) continue;
              if (row >= got.num_rows || !IsRow(got, step, row, tokens.x.data() + static_cast<size_t>(t) * c_.hidden)) {
                return Wrong(absl::StrCat("row ", row, " of rank ", runner.rank, " step ", s));
              }
              if (got.weights[row] != tokens.weights[t * c_.top_k + j]) return Wrong("a routing weight");
              ++row;
            }
          }
        }
      }
      if (row != got.num_rows) return Wrong("number of rows");
      const Tokens& mine = all[runner.rank];
      for (int t = 0; t < mine.count; ++t) {
        std::set<int> nodes;
        for (const int expert : Experts(mine, t)) nodes.insert(NodeOf(expert));
        nodes.erase(c_.node_of[runner.rank]);
        *rows += nodes.size();
      }
    }
    return absl::OkStatus();
  }

  bool IsRow(const Dispatched& got, const Step& step, int64_t row, const float* x) const {
    const std::byte* at = got.x + row * got.row_bytes;
    if (step.to_fp8) {
      std::vector<std::byte> want(Fp8RowBytes(c_.hidden));
      QuantizeFp8({x, static_cast<size_t>(c_.hidden)}, want.data());
      return got.row_bytes == want.size() && std::memcmp(at, want.data(), want.size()) == 0;
    }
    if (step.type == RowType::kFp32) return std::memcmp(at, x, c_.hidden * 4) == 0;
    for (int i = 0; i < c_.hidden; ++i) {
      if (reinterpret_cast<const uint16_t*>(at)[i] != Bf16FromFloat(x[i])) return false;
    }
    return true;
  }

  absl::Status CheckCombine(int b, size_t s, uint64_t* partials) {
    const Step& step = programs_[b].steps[s];
    const Step& dispatch = programs_[b].steps[step.from];
    std::vector<int> node_of_expert;
    for (int e = 0; e < c_.num_experts; ++e) node_of_expert.push_back(NodeOf(e));
    for (Runner& runner : runners_[b]) {
      const Tokens& tokens = programs_[b].tokens[step.from][runner.rank];
      const Runner::Output& got = runner.outputs[s];
      for (int t = 0; t < tokens.count; ++t) {
        std::vector<std::vector<float>> ys;
        std::vector<oracle::Leaf> leaves;
        for (int j = 0; j < c_.top_k; ++j) {
          const int expert = tokens.ids[t * c_.top_k + j];
          if (expert < 0) {
            if (step.has_scalars && got.scalars_out[t * c_.top_k + j] != 0) return Wrong("a masked scalar");
            continue;
          }
          ys.push_back(ExpertOutput(dispatch, tokens, t, expert, step.rows_bf16));
          leaves.push_back({expert, step.is_weighted ? tokens.weights[t * c_.top_k + j] : 1.0f, nullptr});
          const float y0 = ExpertOutput(dispatch, tokens, t, expert, false)[0];
          if (step.has_scalars && got.scalars_out[t * c_.top_k + j] != y0 + expert) {
            return Wrong(absl::StrCat("scalar of token ", t, " choice ", j, " rank ", runner.rank, " step ", s));
          }
        }
        for (size_t i = 0; i < leaves.size(); ++i) leaves[i].y = ys[i].data();
        // All columns of small rows, a few of wide ones: columns do not know each other.
        const int stride = std::max(1, c_.hidden / 64);
        for (int column = 0; column < c_.hidden; column += stride) {
          const float want = oracle::Sum(0, c_.num_experts, leaves, c_.wire_block, column).value_or(0.0f);
          const float have = got.out[static_cast<size_t>(t) * c_.hidden + column];
          if (std::memcmp(&want, &have, sizeof(want)) != 0) {
            return Wrong(absl::StrCat("combine of token ", t, " column ", column, " rank ", runner.rank, " step ", s,
                                      ": ", have, ", the oracle has ", want));
          }
        }
        const std::vector<int> experts = Experts(tokens, t);
        for (int node = 0; node <= *std::max_element(c_.node_of.begin(), c_.node_of.end()); ++node) {
          if (node == c_.node_of[runner.rank]) continue;
          *partials += oracle::NumPartials(0, c_.num_experts, experts, node_of_expert, node);
        }
      }
    }
    return absl::OkStatus();
  }

  std::vector<float> ExpertOutput(const Step& dispatch, const Tokens& tokens, int t, int expert, bool to_bf16) const {
    const float* x = tokens.x.data() + static_cast<size_t>(t) * c_.hidden;
    std::vector<float> y(x, x + c_.hidden);
    if (dispatch.to_fp8) {
      std::vector<std::byte> row(Fp8RowBytes(c_.hidden));
      QuantizeFp8(y, row.data());
      DequantizeFp8(row.data(), absl::MakeSpan(y));
    }
    for (float& value : y) {
      value = ExpertOf(expert, value);
      if (to_bf16) value = FloatFromBf16(Bf16FromFloat(value));
    }
    return y;
  }

  // I + O of the protocol: in-peers' ROUTE and ROWS, other nodes' PART, and the same the other way round.
  size_t SlotsOf(int rank) const {
    fabric::Membership membership;
    membership.self = rank;
    for (const int node : c_.node_of) membership.members.push_back({node, ""});
    const Topology topology(membership);
    const size_t in_peers = topology.in_peers().size(), nodes = topology.num_nodes() - 1;
    const size_t hop_one = 1 + c_.options.rows_slots, back = c_.options.part_slots;
    return c_.num_buffers * (in_peers * hop_one + nodes * back + nodes * hop_one + in_peers * back);
  }

  int NodeOf(int expert) const { return c_.node_of[c_.owner[expert]]; }
  std::vector<int> Experts(const Tokens& tokens, int t) const {
    std::vector<int> experts;
    for (int j = 0; j < c_.top_k; ++j) {
      if (tokens.ids[t * c_.top_k + j] >= 0) experts.push_back(tokens.ids[t * c_.top_k + j]);
    }
    return experts;
  }
  bool IsFinished() const {
    for (size_t b = 0; b < runners_.size(); ++b) {
      for (const Runner& runner : runners_[b]) {
        if (runner.next < programs_[b].steps.size() || runner.num_open > 0) return false;
      }
    }
    return true;
  }
  std::string Stuck() const {
    std::string who;
    for (size_t b = 0; b < runners_.size(); ++b) {
      for (const Runner& runner : runners_[b]) {
        if (runner.next == programs_[b].steps.size() && runner.num_open == 0) continue;
        absl::StrAppend(&who, " rank ", runner.rank, " buffer ", b, " at step ", runner.next, " of ",
                        programs_[b].steps.size());
      }
    }
    return who;
  }

  const ScenarioConfig& c_;
  Random random_;
  const int ranks_;
  std::vector<Program> programs_;
  std::vector<fabric::ChaosTransport*> chaos_;
  std::vector<std::unique_ptr<Group>> groups_;
  std::vector<std::vector<Runner>> runners_;  // by buffer, by rank
};

}  // namespace

ScenarioResult RunScenario(const ScenarioConfig& config, uint64_t program_seed, uint64_t schedule_seed) {
  ScenarioResult result;
  World world(config, program_seed, schedule_seed);
  result.status = world.Open();
  if (result.status.ok()) result.status = world.Run(&result.steps);
  if (result.status.ok()) result.status = world.Check();
  if (result.status.ok()) result.status = world.Quiesce();
  if (result.status.ok()) result.digest = world.Digest();
  return result;
}

}  // namespace moerl::ep
