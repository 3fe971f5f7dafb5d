#ifndef MOERL_SERVICES_TRAINER_LEDGER_H_
#define MOERL_SERVICES_TRAINER_LEDGER_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "libs/base/sqlite.h"
#include "services/trainer/ledger_state.h"

namespace moerl::trainer {

// Where the trainer's knowledge is durable. Storage seam: SQLite in the programs, memory in the simulation.
class Ledger {
 public:
  virtual ~Ledger() = default;

  // First transaction of a trainer: stores `epoch` if it is higher than the stored one and returns the state as it
  // is then. ABORTED: a trainer with this epoch or a higher one has been here; exit.
  virtual absl::StatusOr<LedgerState> Open(int64_t epoch) = 0;

  // Makes the writes durable, all or none, in order, or with none checks the epoch. On return they survive a loss of
  // power. ABORTED: a newer epoch exists; the caller must change nothing more, answer nobody, and exit.
  virtual absl::Status Commit(int64_t epoch, std::span<const LedgerWrite> writes) = 0;
};

struct LedgerIdentity {
  std::string run_id;
  int64_t group_size = 0;          // samples a group
  std::string prompt_fingerprint;  // of the prompt source: its cursor means nothing on other prompts
};

// A SQLite file (WAL, synchronous=FULL), documented in docs/ledger.md. Readers in other processes may look at any
// time. Thread-compatible.
class SqliteLedger final : public Ledger {
 public:
  // Opens or creates the file at `path`. Errors: FAILED_PRECONDITION on a network file system (WAL needs shared
  // memory, and two hosts could both think they hold the file), or if the file belongs to another run, group size
  // or prompts; names both values.
  static absl::StatusOr<std::unique_ptr<SqliteLedger>> OpenFile(const std::string& path,
                                                                const LedgerIdentity& identity);
  absl::StatusOr<LedgerState> Open(int64_t epoch) override;
  absl::Status Commit(int64_t epoch, std::span<const LedgerWrite> writes) override;

  // What is stored, for tests and tools; no epoch is claimed.
  absl::StatusOr<LedgerState> Load();

 private:
  SqliteLedger(std::unique_ptr<Sqlite> database, int64_t group_size)
      : database_(std::move(database)), group_size_(group_size) {}
  absl::Status CheckIdentity(const LedgerIdentity& identity);
  absl::Status CheckEpoch(int64_t epoch);

  std::unique_ptr<Sqlite> database_;
  int64_t group_size_;
  int64_t forgotten_through_ = -1;  // payloads of steps up to here are gone already
};

}  // namespace moerl::trainer

#endif  // MOERL_SERVICES_TRAINER_LEDGER_H_
