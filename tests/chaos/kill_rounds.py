#!/usr/bin/env python3
"""Whole runs under SIGKILL: nothing lost, nothing trained twice, the same weights.

  tests/chaos/kill_rounds.py --rounds 20                    # 20 rounds at staleness 0, then 20 at staleness 1
  tests/chaos/kill_rounds.py --rounds 5 --staleness 0 --set algorithm.name=ppo

A first run makes a policy that is almost warm; every round starts from it, so that a round is a few more supervised
steps and 20 short steps of reinforcement learning. Each round runs `moerl run` and kills processes of it at random moments (weight_sync, the trainer's leader and
followers, rollout servers, `moerl run` itself, which is then resumed), from a seed that is printed. Afterwards

  - the run has done all its steps, and a journal written by the code that computes gradients, the ledger and the
    checkpoint's hash of trained groups agree: each group once, or dropped with a reason; a step that was taken again
    was taken on the same tokens and rewards;
  - no version that weight_sync calls READY misses a byte: looked at after every kill and at the end;
  - no token was trained on beyond the staleness bound, and none was computed otherwise than it was sampled;
  - at staleness 0 the final weights, moments and critic are those of an undisturbed run, bit for bit.

Prints one JSON line a round and exits 1 if any failed.
"""

import argparse
import collections
import ctypes
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

POLL_S = 0.02
ROUND_S_MAX = 600
SHORT = ["trainer.prompts_per_step=8", "trainer.samples_per_prompt=8", "trainer.checkpoint_every_steps=5",
         "trainer.lease_duration_ms=5000", "task.num_held_out=64"]
# Pass rates at which supervision ends: of the first run, and of the rounds.
ALMOST_WARM, WARM = 0.05, 0.1

XXH3 = ctypes.CDLL("libxxhash.so.0").XXH3_64bits
XXH3.restype = ctypes.c_uint64
XXH3.argtypes = [ctypes.c_char_p, ctypes.c_size_t]


def hash_of_groups(groups):
    """The checkpoint's hash: XXH3-64 of the ids in order, as little-endian 64-bit integers."""
    ids = b"".join(group.to_bytes(8, "little") for group in groups)
    return f"{XXH3(ids, len(ids)):016x}"


def ready_versions(catalogue):
    """(epoch, number, id) of versions in state READY (2)."""
    return set(catalogue.execute("SELECT epoch, number, id FROM versions WHERE state = 2"))


def missing_bytes(store):
    """What READY versions miss, as text. A version that stops being READY meanwhile may lose its chunks."""
    faults = {}
    catalogue = sqlite3.connect(f"file:{store}/catalogue.sqlite?mode=ro", uri=True)
    with catalogue:
        before = ready_versions(catalogue)
        for epoch, number, version in before:
            refs = list(catalogue.execute(
                "SELECT refs.sha256, chunks.bytes, inline_chunks.data FROM refs LEFT JOIN chunks USING (sha256)"
                " LEFT JOIN inline_chunks USING (sha256) WHERE refs.version_id = ?", (version,)))
            if not refs:
                faults[version] = f"version {epoch}.{number} is READY and has no chunks"
            for sha256, size, data in refs:
                path = store / "chunks" / sha256.hex()
                if data is None:
                    data = path.read_bytes() if path.exists() else b""
                if size != len(data) or hashlib.sha256(data).digest() != sha256:
                    faults[version] = f"version {epoch}.{number} is READY, chunk {sha256.hex()} has {len(data)} bytes of {size}"
    after = {version for _, _, version in ready_versions(catalogue)}
    catalogue.close()
    return [fault for version, fault in faults.items() if version in after], len(before)


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
    def __init__(self, args, directory, settings):
        self.args, self.directory = args, directory
        self.store_faults, self.store_looks = [], 0
        self.settings = [f"trainer.run_directory={directory}", f"trainer.journal_file={directory}.journal", *SHORT,
                         *settings, *args.set]

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

    def look_at_store(self):
        try:
            faults, num_versions = missing_bytes(self.directory / "store")
        except sqlite3.OperationalError:
            return  # not there yet, or its owner is starting
        self.store_faults += faults
        self.store_looks += num_versions

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
                    self.look_at_store()
            time.sleep(POLL_S)
        self.kill_all()
        return "timeout", kills

    def newest_checkpoint(self):
        return max(self.directory.glob("checkpoints/step_*"))

    def weights(self):
        """Of the exported policy, and of masters, moments and critic in the last checkpoint."""
        digest = hashlib.sha256((self.directory / "model" / "model.safetensors").read_bytes())
        for path in sorted(self.newest_checkpoint().glob("*.safetensors")):
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16]

    def check(self, staleness):
        """What does not agree, as text; empty when everything does. And the number of dropped groups."""
        self.look_at_store()
        faults = list(self.store_faults)
        if self.store_looks == 0:
            faults.append("weight_sync's catalogue could not be read")
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
        journal, last_epoch, digests = collections.defaultdict(dict), {}, {}
        for line in pathlib.Path(f"{self.directory}.journal").read_text().splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue  # cut by a kill: the step was taken again
            key = entry["step"]
            if entry["epoch"] > last_epoch.get(key, 0):
                last_epoch[key], journal[key] = entry["epoch"], {}
            journal[key][entry["group"]] = entry["samples"]
            if digests.setdefault((key, entry["group"]), entry["digest"]) != entry["digest"]:
                faults.append(f"step {key}, taken again in epoch {entry['epoch']}: group {entry['group']} has changed")
        samples = None
        for step, groups in sorted(batches.items()):
            if list(journal[step]) != groups:
                faults.append(f"step {step}: gradients came from {list(journal[step])}, recorded are {groups}")
            samples = samples or set(journal[step].values())
            if set(journal[step].values()) != samples:
                faults.append(f"step {step}: a group was trained on in part")
        newest = self.newest_checkpoint()
        info = json.loads((newest / "checkpoint.json").read_text())
        by_gradient = [group for step in sorted(journal) for group in journal[step]]
        expected = (self.args.steps, len(trained), hash_of_groups(trained), hash_of_groups(by_gradient))
        found = (info["step"], info["trained_groups"], info["trained_hash"], info["trained_hash"])
        if found != expected:
            faults.append(f"{newest}: {found}, ledger and journal say {expected}")
        rows = self.rows()
        if [r["step"] for r in rows] != list(range(1, self.args.steps + 1)):
            faults.append(f"metrics rows: {[r['step'] for r in rows]}")
        for row in rows:
            too_old = sum(row["staleness_histogram"][staleness + 1:])
            if too_old or row["max_abs_mismatch"] != 0:
                faults.append(f"step {row['step']}: {too_old} stale tokens, mismatch {row['max_abs_mismatch']}")
            if staleness == 0 and row["mismatch_tokens"] != row["trained_tokens"]:
                faults.append(f"step {row['step']}: {row['mismatch_tokens']} of {row['trained_tokens']} compared")
        return faults, states[3]


def almost_warm_policy(args, work):
    """The model directory that every round starts from."""
    run = Run(args, work / "policy", ["trainer.num_steps=1", f"trainer.warm_start.pass_rate_min={ALMOST_WARM}"])
    code, _ = run.drive(random.Random(0), 0)
    if code != 0:
        sys.exit(f"the first run, without a kill, ends with {code}: {run.directory}.out")
    return run.directory / "model"


def play_round(args, work, policy, staleness, index):
    """Round `index` (-1: nothing is killed) as a dictionary to print."""
    seed = args.seed + index
    rng = random.Random(seed)
    run = Run(args, work / f"staleness{staleness}-round{index}",
              [f"model.path={policy}", f"trainer.num_steps={args.steps}", f"trainer.staleness={staleness}",
               f"trainer.warm_start.pass_rate_min={WARM}"])
    began = time.monotonic()
    code, kills = run.drive(rng, 0 if index < 0 else rng.randint(1, args.kills))
    faults, dropped, weights = [f"exit code {code}"], 0, None
    if code == 0:
        faults, dropped = run.check(staleness)
        weights = run.weights()
    return run, {"staleness": staleness, "round": index, "seed": seed, "kills": kills,
                 "seconds": round(time.monotonic() - began, 1), "ready_versions_read": run.store_looks,
                 "dropped": dropped, "weights": weights, "faults": faults}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--bin", default="build/release/bin")
    parser.add_argument("--config", default="examples/reverse.yaml")
    parser.add_argument("--rounds", type=int, default=20, help="at each staleness")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--kills", type=int, default=6, help="at most, a round")
    parser.add_argument("--delay-s-max", type=float, default=0.2, help="of a kill after its step")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--keep", action="store_true", help="keep the run directories")
    args = parser.parse_args()
    work = pathlib.Path(tempfile.mkdtemp(prefix="moerl-kills-"))
    policy = almost_warm_policy(args, work)
    failed, num_rounds, num_kills, began = 0, 0, 0, time.monotonic()
    for staleness in args.staleness:
        undisturbed = None
        for index in range(-1 if staleness == 0 else 0, args.rounds):
            run, report = play_round(args, work, policy, staleness, index)
            undisturbed = undisturbed or (report["weights"] if index < 0 else None)
            if staleness == 0 and report["weights"] != undisturbed:
                report["faults"].append(f"final weights {report['weights']}, undisturbed {undisturbed}")
            report["faults"] = report["faults"][:5]
            print(json.dumps(report), flush=True)
            failed += bool(report["faults"])
            num_rounds += index >= 0
            num_kills += len(report["kills"])
            if not args.keep and not report["faults"]:
                shutil.rmtree(run.directory, ignore_errors=True)
    print(json.dumps({"rounds": num_rounds, "failed": failed, "kills": num_kills,
                      "seconds": round(time.monotonic() - began, 1)}))
    if not failed and not args.keep:
        shutil.rmtree(work, ignore_errors=True)
    elif failed:
        print(f"kept: {work}", file=sys.stderr)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
