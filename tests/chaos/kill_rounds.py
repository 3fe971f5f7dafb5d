#!/usr/bin/env python3
"""Whole runs under SIGKILL: nothing lost, nothing trained twice, the same weights.

  tests/chaos/kill_rounds.py --bin build/release/bin --config examples/reverse.yaml --rounds 20 --staleness 0

Each round runs `moerl run` and kills processes of it at random moments (weight_sync, the trainer's leader and
followers, rollout servers, `moerl run` itself, which is then resumed), from a seed that is printed. Afterwards

  - the run has done all its steps, and a journal written by the code that computes gradients, the ledger and the
    checkpoint's hash of trained groups agree: each group once, or dropped with a reason;
  - no token was trained on beyond the staleness bound, and none was computed otherwise than it was sampled;
  - at staleness 0 the final weights are those of an undisturbed run, bit for bit.

Prints one JSON line a round and exits 1 if any failed.
"""

import argparse
import collections
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time

POLL_S = 0.05
ROUND_S_MAX = 600


def processes():
    """(pid, parent, command line) of every process."""
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
            command = (entry / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        yield int(entry.name), int(stat.rsplit(")", 1)[1].split()[1]), [c.decode() for c in command if c]


def members(root_pid):
    """The run's own processes by pid: what each is."""
    found = {}
    for pid, parent, command in processes():
        if pid == root_pid:
            found[pid] = "run"
        elif parent == root_pid and command:
            name = os.path.basename(command[0]).removeprefix("moerl-")
            rank = next((c.split("=")[1] for c in command if c.startswith("trainer.rank=")), "")
            found[pid] = name + (f"-{rank}" if rank else "")
    return found


class Run:
    def __init__(self, args, directory):
        self.args, self.directory = args, directory
        self.settings = [
            f"trainer.run_directory={directory}", f"trainer.journal_file={directory}.journal",
            f"trainer.num_steps={args.steps}", f"trainer.staleness={args.staleness}",
            "trainer.checkpoint_every_steps=5", "trainer.lease_duration_ms=5000", *args.set]

    def start(self, resume):
        command = [f"{self.args.bin}/moerl", "run", self.args.config]
        command += ["--resume"] if resume else []
        for setting in self.settings:
            command += ["--set", setting]
        log = open(f"{self.directory}.out", "ab")
        self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def rows(self):
        path = self.directory / "metrics.jsonl"
        if not path.exists():
            return []
        rows = []
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                pass  # the last line, half written
        return rows

    def kill_all(self):
        for pid in members(self.process.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def drive(self, rng, num_kills):
        """Kills num_kills processes at random moments, resumes what was killed whole, until the run ends.

        A moment is a step after which to kill (0: while it starts) and a delay, so that a busy machine has the
        same ones.
        """
        moments = sorted((rng.randint(0, self.args.steps - 1), rng.uniform(0.0, self.args.delay_s_max))
                         for _ in range(num_kills))
        began, kills, due = time.monotonic(), [], None
        self.start(resume=False)
        while time.monotonic() - began < ROUND_S_MAX:
            code = self.process.poll()
            if code is not None and code != -signal.SIGKILL:
                return code, kills
            if code is not None:
                time.sleep(1.0)  # its children die with it
                self.start(resume=(self.directory / "ledger.sqlite").exists())
            if len(kills) < len(moments):
                target, delay = moments[len(kills)]
                step = self.rows()[-1]["step"] if self.rows() else 0
                if due is None and step >= target:
                    due = time.monotonic() + delay
                if due is not None and time.monotonic() >= due:
                    alive, due = members(self.process.pid), None
                    pid = rng.choice(sorted(alive))
                    kills.append(f"{alive[pid]}@{step}")
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        pass
            time.sleep(POLL_S)
        self.kill_all()
        return "timeout", kills

    def weights(self):
        return hashlib.sha256((self.directory / "model" / "model.safetensors").read_bytes()).hexdigest()[:16]

    def check(self):
        """What does not agree, as text; empty when everything does."""
        faults = []
        ledger = sqlite3.connect(f"file:{self.directory}/ledger.sqlite?mode=ro", uri=True)
        batches = collections.defaultdict(list)
        for step, group in ledger.execute("SELECT step, group_number FROM batch_groups ORDER BY step, place"):
            batches[step].append(group)
        trained = [group for step in sorted(batches) for group in batches[step]]
        if len(batches) != self.args.steps or len(set(trained)) != len(trained):
            faults.append(f"ledger: {len(batches)} batches, {len(trained)} groups, {len(set(trained))} different")
        states = collections.Counter()
        for number, state, reason in ledger.execute("SELECT number, state, reason FROM groups"):
            states[state] += 1
            expected = 2 if number in set(trained) else 3
            if state != expected or (state == 3 and reason == 0):
                faults.append(f"group {number} ends in state {state} with reason {reason}")
        prompts = [p for (p,) in ledger.execute("SELECT prompt_index FROM groups ORDER BY number")]
        if prompts != list(range(len(prompts))):
            faults.append("a prompt was skipped or repeated")
        journal, last_epoch = collections.defaultdict(dict), {}
        for line in pathlib.Path(f"{self.directory}.journal").read_text().splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue  # cut by a kill: the step was taken again
            key = entry["step"]
            if entry["epoch"] > last_epoch.get(key, 0):
                last_epoch[key], journal[key] = entry["epoch"], {}
            journal[key][entry["group"]] = entry["samples"]
        samples = None
        for step, groups in sorted(batches.items()):
            if list(journal[step]) != groups:
                faults.append(f"step {step}: gradients came from {list(journal[step])}, recorded are {groups}")
            samples = samples or set(journal[step].values())
            if set(journal[step].values()) != samples:
                faults.append(f"step {step}: a group was trained on in part")
        newest = max(self.directory.glob("checkpoints/step_*/checkpoint.json"))
        info = json.loads(newest.read_text())
        if info["trained_groups"] != len(trained) or info["step"] != self.args.steps:
            faults.append(f"{newest}: {info['trained_groups']} groups at step {info['step']}")
        rows = self.rows()
        if [r["step"] for r in rows] != list(range(1, self.args.steps + 1)):
            faults.append(f"metrics rows: {[r['step'] for r in rows]}")
        for row in rows:
            too_old = sum(row["staleness_histogram"][self.args.staleness + 1:])
            if too_old or row["max_abs_mismatch"] != 0:
                faults.append(f"step {row['step']}: {too_old} stale tokens, mismatch {row['max_abs_mismatch']}")
            if self.args.staleness == 0 and row["mismatch_tokens"] != row["trained_tokens"]:
                faults.append(f"step {row['step']}: {row['mismatch_tokens']} of {row['trained_tokens']} compared")
        return faults, states[3]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--bin", default="build/release/bin")
    parser.add_argument("--config", default="examples/reverse.yaml")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--staleness", type=int, default=0)
    parser.add_argument("--kills", type=int, default=4, help="at most, a round")
    parser.add_argument("--delay-s-max", type=float, default=2.0, help="of a kill after its step")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--keep", action="store_true", help="keep the run directories")
    args = parser.parse_args()
    work = pathlib.Path(tempfile.mkdtemp(prefix="moerl-kills-"))
    undisturbed, failed = None, 0
    for index in range(-1 if args.staleness == 0 else 0, args.rounds):
        seed = args.seed + index
        rng = random.Random(seed)
        run = Run(args, work / f"round{index}")
        began = time.monotonic()
        code, kills = run.drive(rng, 0 if index < 0 else rng.randint(1, args.kills))
        faults, dropped = [f"exit code {code}"], 0
        weights = None
        if code == 0:
            faults, dropped = run.check()
            weights = run.weights()
            undisturbed = undisturbed or (weights if index < 0 else None)
            if args.staleness == 0 and weights != undisturbed:
                faults.append(f"final weights {weights}, undisturbed {undisturbed}")
        failed += bool(faults)
        print(json.dumps({"round": index, "seed": seed, "kills": kills, "seconds": round(time.monotonic() - began, 1),
                          "dropped": dropped, "weights": weights, "faults": faults[:5]}), flush=True)
        if not args.keep and not faults:
            shutil.rmtree(run.directory, ignore_errors=True)
    if not failed and not args.keep:
        shutil.rmtree(work, ignore_errors=True)
    elif failed:
        print(f"kept: {work}", file=sys.stderr)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
