"""`moerl run` from outside: its processes, their deaths, its own, Ctrl-C, and what it refuses."""

import json
import os
import pty
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

BIN = os.path.abspath(sys.argv.pop(1))
CONFIG = """
name: reverse
model:
  compute: fp32
  init: {hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 2, num_experts: 4,
         moe_intermediate_size: 32, max_position_embeddings: 64}
task: {name: reverse}
trainer: {num_ranks: 2, num_threads: 1, num_steps: 100000, prompts_per_step: 4, samples_per_prompt: 2}
rollout: {num_servers: 2, num_threads: 1, sampling: {max_new_tokens: 10}}
server: {drain_grace_ms: 5000}
"""
MEMBERS = {"weight-sync", "trainer-0", "trainer-1", "rollout-0", "rollout-1"}


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Run:
    """One `moerl run` in a directory of its own."""

    def __init__(self, directory, *arguments, programs=BIN):
        self.directory = directory
        self.output = open(os.path.join(directory, "output.txt"), "a+")
        self.output_begins = self.output.seek(0, os.SEEK_END)
        self.process = subprocess.Popen(
            [os.path.join(programs, "moerl"), "run", "config.yaml", *arguments],
            cwd=directory, stdout=self.output, stderr=self.output, start_new_session=True)

    def members(self):
        """Process ids by the member's name, from the log file each writes to."""
        found = {}
        try:
            with open(f"/proc/{self.process.pid}/task/{self.process.pid}/children") as children:
                pids = [int(pid) for pid in children.read().split()]
            for pid in pids:
                log = os.readlink(f"/proc/{pid}/fd/1")
                if is_running(pid) and log.endswith(".log"):
                    found[os.path.basename(log)[: -len(".log")]] = pid
        except OSError:
            pass
        return found

    def wait_for_members(self):
        return wait_until(lambda: set(self.members()) == MEMBERS)

    def said(self):
        self.output.seek(self.output_begins)
        return self.output.read()

    def stop(self, signal_number=signal.SIGINT):
        if self.process.poll() is None:
            self.process.send_signal(signal_number)
        return self.process.wait(30)


class MoerlRun(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.mkdtemp(prefix="moerl_run_test.")
        self.write_config(CONFIG)
        self.runs = []

    def tearDown(self):
        for run in self.runs:
            if run.process.poll() is None:
                run.process.kill()
                run.process.wait()
            run.output.close()
        subprocess.run(["rm", "-rf", self.directory], check=True)

    def write_config(self, text):
        with open(os.path.join(self.directory, "config.yaml"), "w") as config:
            config.write(text)

    def start(self, *arguments, programs=BIN):
        self.runs.append(Run(self.directory, *arguments, programs=programs))
        return self.runs[-1]

    def started(self, *arguments):
        run = self.start(*arguments)
        self.assertTrue(run.wait_for_members(), run.said())
        return run

    def refusal(self, *arguments):
        """Exit code and the one line that it gives."""
        done = subprocess.run(
            [os.path.join(BIN, "moerl"), "run", "config.yaml", *arguments],
            cwd=self.directory, capture_output=True, text=True, timeout=20)
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        return done.returncode, done.stderr

    def test_starts_every_process_in_a_group_of_its_own_and_says_where_each_serves(self):
        run = self.started()
        groups = {os.getpgid(pid) for pid in run.members().values()}
        self.assertEqual(groups, set(run.members().values()))
        with open(os.path.join(self.directory, "runs/reverse/endpoints.json")) as file:
            endpoints = json.load(file)
        self.assertEqual(set(endpoints), MEMBERS)
        addresses = [end[kind] for end in endpoints.values() for kind in ("address", "metrics")]
        self.assertEqual(len(set(addresses)), 2 * len(MEMBERS))
        token = os.stat(os.path.join(self.directory, "runs/reverse/fabric.token"))
        self.assertEqual(token.st_mode & 0o777, 0o600)

    def test_a_killed_rollout_comes_back_alone(self):
        run = self.started()
        before = run.members()
        os.kill(before["rollout-1"], signal.SIGKILL)
        self.assertTrue(wait_until(lambda: run.members().get("rollout-1", before["rollout-1"]) != before["rollout-1"]))
        after = run.members()
        for name in MEMBERS - {"rollout-1"}:
            self.assertEqual(before[name], after[name], name)
        self.assertIn("rollout-1 ended: signal 9", run.said())

    def test_a_killed_rank_brings_the_whole_trainer_down_and_back(self):
        run = self.started()
        before = run.members()
        os.kill(before["trainer-1"], signal.SIGKILL)
        self.assertTrue(wait_until(
            lambda: set(run.members()) == MEMBERS
            and all(run.members()[name] != before[name] for name in ("trainer-0", "trainer-1"))), run.said())
        self.assertEqual(run.members()["weight-sync"], before["weight-sync"])

    def test_a_crash_is_told_by_its_signal(self):
        run = self.started()
        self.assertTrue(wait_until(lambda: "step 1/" in run.said(), 60), run.said())
        resource.prlimit(run.members()["trainer-1"], resource.RLIMIT_CORE, (0, 0))
        os.kill(run.members()["trainer-1"], signal.SIGABRT)
        self.assertTrue(wait_until(lambda: "trainer-1 ended: signal 6 (Aborted)" in run.said()), run.said())

    def test_ctrl_c_leaves_no_process_and_a_run_that_resumes(self):
        run = self.started()
        pids = list(run.members().values())
        self.assertTrue(wait_until(lambda: "step 1/" in run.said(), 60), run.said())
        self.assertEqual(run.stop(), 128 + signal.SIGINT)
        self.assertFalse([pid for pid in pids if is_running(pid)])
        self.assertIn("continue with --resume", run.said())
        code, line = self.refusal()
        self.assertEqual(code, 1)
        self.assertIn("holds a run already", line)
        self.started("--resume")

    def test_ctrl_c_stops_it_well_though_nobody_reads_what_it_says(self):
        process = subprocess.Popen([os.path.join(BIN, "moerl"), "run", "config.yaml"], cwd=self.directory,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.addCleanup(lambda: (process.kill(), process.wait()))
        self.assertTrue(any(line.startswith("step 1/") for line in process.stdout))
        process.stdout.close()
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(30), 128 + signal.SIGINT)
        self.started("--resume")

    def moerl(self, *arguments):
        return subprocess.run([os.path.join(BIN, "moerl"), *arguments], cwd=self.directory, capture_output=True, text=True)

    def test_status_and_weights_tell_of_a_run_that_goes_and_of_one_that_does_not(self):
        run = self.started()
        self.assertTrue(wait_until(lambda: "step 2/" in run.said(), 60), run.said())
        status = json.loads(self.moerl("status", "--json").stdout)
        self.assertEqual(status["num_ranks"], 2)
        self.assertGreaterEqual(int(status["step"]), 2)
        self.assertIn("reward", self.moerl("status", "runs/reverse").stdout)
        self.assertIn("ready", self.moerl("weights").stdout)
        other = os.path.join(self.directory, "runs/other")  # stopped, and its ports are another's by now
        shutil.copytree(os.path.join(self.directory, "runs/reverse"), other,
                        ignore=lambda _, names: set(names) - {"config.yaml", "endpoints.json"})
        with open(os.path.join(other, "config.yaml"), "w") as config:
            config.write(CONFIG.replace("name: reverse\n", "name: other\n", 1))
        self.assertIn('is that of run "reverse", not of "other"', self.moerl("status", "runs/other").stderr)
        shutil.rmtree(other)
        run.stop()
        self.assertIn("not running; its last step:\nstep ", self.moerl("status").stdout)
        done = self.moerl("status", "--address", "127.0.0.1:1")
        self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1))
        done = self.moerl("status", "one", "two")
        self.assertEqual(done.returncode, 2)
        self.assertIn("expected 0 to 1 arguments beside options, found 2", done.stderr)

    def test_what_a_step_has_left_can_be_evaluated_while_it_trains(self):
        run = self.started("--set", "trainer.checkpoint_every_steps=5", "--set", "trainer.checkpoints_kept=1000")
        self.assertTrue(wait_until(lambda: "step 6/" in run.said(), 60), run.said())
        done = self.moerl("eval", "config.yaml", "--model", "runs/reverse/checkpoints/step_00000005_epoch_1/model",
                          "--num-prompts", "8", "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(json.loads(done.stdout)["num_failed"], 0)

    def test_a_missing_model_ends_it_at_once_with_the_reason_and_is_no_run(self):
        run = self.start("--set", "model.path=nowhere")
        self.assertEqual(run.process.wait(20), 2, run.said())
        self.assertIn("it refuses its configuration", run.said())
        self.assertIn("nowhere/config.json: cannot be read", run.said())
        self.started()

    def test_a_secret_that_is_none_is_refused(self):
        with open(os.path.join(self.directory, "token"), "w") as token:
            token.write("short")
        run = self.start("--set", "fabric.token_file=token")
        self.assertEqual(run.process.wait(20), 2, run.said())
        self.assertIn("token holds 5 bytes, expected a secret of at least 16", run.said())

    def test_in_a_terminal_the_reason_is_said_whole(self):
        terminal, end = pty.openpty()
        process = subprocess.Popen([os.path.join(BIN, "moerl"), "run", "config.yaml", "--set", "model.path=nowhere"],
                                   cwd=self.directory, stdin=subprocess.DEVNULL, stdout=end, stderr=end)
        os.close(end)
        said = b""
        while True:
            try:
                said += os.read(terminal, 4096)
            except OSError:  # as a terminal ends
                break
        os.close(terminal)
        self.assertEqual(process.wait(20), 2)
        last = said.decode().splitlines()[-1]
        self.assertIn("nowhere/config.json: cannot be read", last)
        self.assertIn("it refuses its configuration; see ", last)

    def test_a_program_that_is_not_there_is_named_and_waited_for(self):
        programs = os.path.join(self.directory, "programs")
        os.mkdir(programs)
        shutil.copy(os.path.join(BIN, "moerl"), programs)
        for name in ("moerl-weight-sync", "moerl-rollout"):
            os.symlink(os.path.join(BIN, name), os.path.join(programs, name))
        run = self.start(programs=programs)
        self.assertTrue(wait_until(lambda: "trainer-0 ended: exit code 127 (start " in run.said()), run.said())
        self.assertIn("programs/moerl-trainer: No such file", run.said())
        self.assertTrue(wait_until(lambda: set(run.members()) == {"weight-sync", "rollout-0", "rollout-1"}), run.said())
        os.symlink(os.path.join(BIN, "moerl-trainer"), os.path.join(programs, "moerl-trainer"))
        self.assertTrue(run.wait_for_members(), run.said())
        self.assertEqual(run.stop(), 128 + signal.SIGINT)

    def test_its_processes_die_with_it(self):
        run = self.started()
        pids = list(run.members().values())
        self.assertTrue(wait_until(lambda: "step 1/" in run.said(), 60), run.said())
        run.process.kill()
        run.process.wait()
        self.assertTrue(wait_until(lambda: not any(map(is_running, pids)), 2))
        self.started("--resume")

    def test_resume_goes_on_with_what_it_was_started_with(self):
        run = self.started("--set", "algorithm.name=ppo", "--set", "rollout.sampling.max_new_tokens=11")
        self.assertTrue(wait_until(lambda: "step 1/" in run.said(), 60), run.said())
        run.stop()
        code, line = self.refusal("--resume", "--set", "algorithm.name=grpo")
        self.assertEqual(code, 1)
        self.assertIn('this would be other training: algorithm.name was "ppo", now "grpo"; leave that --set out', line)
        again = self.started("--resume", "--set", "trainer.num_steps=90000")
        self.assertIn("trainer.num_steps: was 100000, now 90000\n"
                      'config.yaml has algorithm.name: "grpo"; the run goes on with "ppo"\n'
                      "config.yaml has rollout.sampling.max_new_tokens: 10; the run goes on with 11\n", again.said())
        self.assertTrue(wait_until(lambda: "/90000" in again.said(), 60), again.said())

    def test_a_resume_with_another_learning_rate_forks_where_it_cannot_replay(self):
        run = self.started()
        self.assertTrue(wait_until(lambda: "step 3/" in run.said(), 60), run.said())
        run.stop(signal.SIGKILL)  # with its processes; the checkpoint is that of step 0
        again = self.started("--resume", "--set", "trainer.learning_rate=0.01")
        self.assertTrue(wait_until(lambda: "step 5/" in again.said(), 60), again.said())
        with open(os.path.join(self.directory, "runs/reverse/logs/trainer-0.log")) as log:
            said = log.read()
        self.assertEqual(said.count("the run forks"), 1)
        again.stop(signal.SIGKILL)
        third = self.started("--resume")  # replays what was recorded under the new rate
        self.assertTrue(wait_until(lambda: "step 6/" in third.said(), 60), third.said())
        with open(os.path.join(self.directory, "runs/reverse/logs/trainer-0.log")) as log:
            self.assertEqual(log.read().count("the run forks"), 1)

    def test_the_trainer_itself_refuses_a_checkpoint_of_other_training(self):
        run = self.started()
        self.assertTrue(wait_until(lambda: "step 1/" in run.said(), 60), run.said())
        run.stop()
        stored = os.path.join(self.directory, "runs/reverse/config.yaml")
        with open(stored) as file:
            text = file.read()
        with open(stored, "w") as file:
            file.write(text.replace('name: "grpo"', 'name: "rloo"'))
        again = self.start("--resume")
        self.assertTrue(wait_until(lambda: 'algorithm.name was "grpo", now "rloo"; put it back' in again.said(), 30), again.said())

    def test_a_directory_in_use_is_refused(self):
        run = self.started()
        code, line = self.refusal("--resume")
        self.assertEqual(code, 1)
        self.assertIn(f"held by process {run.process.pid}", line)

    def test_resume_without_a_run_is_refused(self):
        code, line = self.refusal("--resume")
        self.assertEqual(code, 1)
        self.assertIn("holds no run to resume", line)

    def test_a_broken_configuration_is_refused_with_its_line(self):
        self.write_config(CONFIG.replace("num_ranks: 2", "num_ranks: many"))
        code, line = self.refusal()
        self.assertEqual(code, 2)
        self.assertIn("config.yaml:8: trainer.num_ranks: expected an integer from 1 to 4096, found many", line)


if __name__ == "__main__":
    unittest.main()
