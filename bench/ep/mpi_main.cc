// moerl-bench-ep-mpi TOKENS ROW_BYTES TOPK EXPERTS SKEW ROUNDS: the same routing by MPI_Alltoallv, one way, only the
// exchange itself timed. Rank 0 prints "rank_dedup MS" (a token once a rank) and "per_expert MS" (once an expert): the
// median round of the slowest rank. Started by moerl-bench-ep --mpi.
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "bench/ep/routing.h"

namespace {

double Exchange(const std::vector<int>& rows, int row_bytes) {
  const int ranks = static_cast<int>(rows.size());
  std::vector<int> send(ranks), receive(ranks), send_at(ranks), receive_at(ranks);
  for (int r = 0; r < ranks; ++r) send[r] = rows[r] * row_bytes;
  MPI_Alltoall(send.data(), 1, MPI_INT, receive.data(), 1, MPI_INT, MPI_COMM_WORLD);
  for (int r = 1; r < ranks; ++r) {
    send_at[r] = send_at[r - 1] + send[r - 1];
    receive_at[r] = receive_at[r - 1] + receive[r - 1];
  }
  std::vector<char> out(send_at.back() + send.back() + 1, 1), in(receive_at.back() + receive.back() + 1, 2);
  MPI_Barrier(MPI_COMM_WORLD);
  const double begin = MPI_Wtime();
  MPI_Alltoallv(out.data(), send.data(), send_at.data(), MPI_BYTE, in.data(), receive.data(), receive_at.data(),
                MPI_BYTE, MPI_COMM_WORLD);
  const double mine = MPI_Wtime() - begin;
  double slowest = 0;
  MPI_Reduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
  return slowest * 1e3;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  if (argc != 7) return 2;
  const int tokens = std::atoi(argv[1]), row_bytes = std::atoi(argv[2]), top_k = std::atoi(argv[3]),
            experts = std::atoi(argv[4]), rounds = std::atoi(argv[6]);
  const double skew = std::atof(argv[5]);
  int rank = 0, ranks = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  for (const bool per_expert : {false, true}) {
    std::vector<double> times;
    for (int round = 0; round < rounds; ++round) {
      const std::vector<int32_t> ids = moerl::bench::DrawIds(tokens, top_k, experts, skew, rank, round);
      std::vector<int> rows(ranks);
      for (int t = 0; t < tokens; ++t) {
        std::vector<bool> has(ranks);
        for (int j = 0; j < top_k; ++j) {
          const int to = ids[t * top_k + j] * ranks / experts;
          rows[to] += per_expert || !has[to] ? 1 : 0;
          has[to] = true;
        }
      }
      times.push_back(Exchange(rows, row_bytes));
    }
    std::sort(times.begin() + 1, times.end());  // the first warms up
    if (rank == 0) std::printf("%s %.3f\n", per_expert ? "per_expert" : "rank_dedup", times[1 + (rounds - 1) / 2]);
  }
  MPI_Finalize();
  return 0;
}
