#include "bench/ep/emulated_nodes.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "libs/base/status_macros.h"

namespace moerl::bench {
namespace {

// A process that does nothing but hold a new network namespace.
absl::StatusOr<pid_t> HoldNamespace() {
  int ready[2];
  if (pipe(ready) != 0) return absl::ResourceExhaustedError("bench: no pipe");
  const pid_t pid = fork();
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const char ok = unshare(CLONE_NEWNET) == 0 ? 1 : 0;
    [[maybe_unused]] const ssize_t written = write(ready[1], &ok, 1);
    while (true) pause();
  }
  char ok = 0;
  const ssize_t got = read(ready[0], &ok, 1);
  close(ready[0]);
  close(ready[1]);
  if (got == 1 && ok == 1) return pid;
  if (pid > 0) kill(pid, SIGKILL);
  return absl::PermissionDeniedError("bench: cannot make a network namespace; run as root");
}

absl::Status Shell(const std::string& command) {
  if (std::system(absl::StrCat(command, " >/dev/null 2>&1").c_str()) == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("bench: this failed: ", command));
}

}  // namespace

EmulatedNodes::~EmulatedNodes() {
  for (const pid_t holder : holders_) {
    kill(holder, SIGKILL);
    waitpid(holder, nullptr, 0);
  }
}

std::string EmulatedNodes::AddressOf(int node) { return absl::StrCat("10.77.0.", node + 1); }

absl::Status EmulatedNodes::Start(int num_nodes, const std::string& rate) {
  for (int i = 0; i <= num_nodes; ++i) {
    MOERL_ASSIGN_OR_RETURN(const pid_t holder, HoldNamespace());
    holders_.push_back(holder);
  }
  const std::string in_switch = absl::StrCat("nsenter -n -t ", holders_.back(), " ");
  const std::string shape = absl::StrCat(" root tbf rate ", rate, " burst 256kb latency 20ms");
  MOERL_RETURN_IF_ERROR(Shell(in_switch + "ip link add br0 type bridge"));
  MOERL_RETURN_IF_ERROR(Shell(in_switch + "ip link set br0 up"));
  for (int node = 0; node < num_nodes; ++node) {
    const std::string in_node = absl::StrCat("nsenter -n -t ", holders_[node], " ");
    const std::string port = absl::StrCat("port", node);
    MOERL_RETURN_IF_ERROR(
        Shell(absl::StrCat(in_switch, "ip link add ", port, " type veth peer name eth0 netns ", holders_[node])));
    MOERL_RETURN_IF_ERROR(Shell(absl::StrCat(in_switch, "ip link set ", port, " master br0 up")));
    MOERL_RETURN_IF_ERROR(Shell(absl::StrCat(in_switch, "tc qdisc add dev ", port, shape)));
    MOERL_RETURN_IF_ERROR(Shell(absl::StrCat(in_node, "ip addr add ", AddressOf(node), "/24 dev eth0")));
    MOERL_RETURN_IF_ERROR(Shell(in_node + "ip link set lo up"));
    MOERL_RETURN_IF_ERROR(Shell(in_node + "ip link set eth0 up"));
    MOERL_RETURN_IF_ERROR(Shell(in_node + "tc qdisc add dev eth0" + shape));
  }
  return absl::OkStatus();
}

absl::Status EmulatedNodes::Enter(int node) const {
  const int fd = open(absl::StrCat("/proc/", holders_[node], "/ns/net").c_str(), O_RDONLY | O_CLOEXEC);
  const bool is_there = fd >= 0 && setns(fd, CLONE_NEWNET) == 0;
  if (fd >= 0) close(fd);
  return is_there ? absl::OkStatus() : absl::InternalError(absl::StrCat("bench: cannot enter node ", node));
}

// mpirun runs on node 0 and starts the others through an agent that enters their namespaces. Host names tell nodes
// apart: by them Open MPI decides who shares memory.
absl::StatusOr<std::string> EmulatedNodes::RunMpi(int ranks_per_node, const std::string& program) const {
  char agent[] = "/tmp/moerl_bench_agent_XXXXXX";
  const int fd = mkstemp(agent);
  if (fd < 0) return absl::ResourceExhaustedError("bench: no temporary file");
  std::string script = "#!/bin/sh\ncase $1 in\n", hosts;
  const int num_nodes = static_cast<int>(holders_.size()) - 1;
  for (int node = 0; node < num_nodes; ++node) {
    absl::StrAppend(&script, "  ", AddressOf(node), ") pid=", holders_[node], " ;;\n");
    absl::StrAppend(&hosts, node == 0 ? "" : ",", AddressOf(node), ":", ranks_per_node);
  }
  absl::StrAppend(&script, "esac\nhost=$1\nshift\nexec nsenter -n -t $pid unshare -u sh -c \"hostname $host; $*\"\n");
  [[maybe_unused]] const ssize_t written = write(fd, script.data(), script.size());
  fchmod(fd, 0700);
  close(fd);
  const std::string command = absl::StrCat(
      "nsenter -n -t ", holders_[0], " unshare -u sh -c 'hostname ", AddressOf(0),
      "; timeout 300 mpirun --allow-run-as-root --oversubscribe --host ", hosts, " --mca plm_rsh_agent ", agent,
      " --mca oob_tcp_if_include 10.77.0.0/24 --mca btl_tcp_if_include 10.77.0.0/24 --mca btl tcp,vader,self "
      "--mca mpi_yield_when_idle 1 ",
      program, "' 2>&1");
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return absl::ResourceExhaustedError("bench: cannot start mpirun");
  std::string output;
  char buffer[4096];
  while (const size_t n = fread(buffer, 1, sizeof(buffer), pipe)) output.append(buffer, n);
  const int status = pclose(pipe);
  unlink(agent);
  if (status != 0) return absl::InternalError(absl::StrCat("bench: mpirun failed: ", output));
  return output;
}

absl::StatusOr<uint64_t> EmulatedNodes::BytesSent() {
  std::ifstream devices("/proc/thread-self/net/dev");
  std::string line;
  while (std::getline(devices, line)) {
    const size_t at = line.find("eth0:");
    if (at == std::string::npos) continue;
    std::istringstream fields(line.substr(at + 5));
    uint64_t value = 0;
    for (int i = 0; i < 9; ++i) fields >> value;  // 8 of receiving, then bytes sent
    return value;
  }
  return absl::NotFoundError("bench: no eth0 on this node");
}

}  // namespace moerl::bench
