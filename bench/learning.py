#!/usr/bin/env python3
"""What algorithms and staleness bounds do to learning: reward by step and by second, and whether bounds were held.

  bench/learning.py                                          # the table of docs/benchmarks.md
  bench/learning.py --only sort-ppo --seeds 1 2 3
  bench/learning.py --run mine examples/reverse.yaml trainer.staleness=2 trainer.learning_rate=0.0005

Each row is one `moerl run`. Prints a JSON line a row: sampled pass rate at the first step and over the last tenth, held-out
pass rate at the end, seconds of reinforcement learning, summed reward a second, seconds until the pass rate of ten
steps was 0.9, the share of trained tokens by staleness, groups dropped. Exits 1 if a token was older than the bound, or
if a finished sample was thrown away: every group that was admitted must have been trained.
"""

import argparse
import json
import pathlib
import shutil
import sqlite3
import subprocess
import sys
import tempfile

REVERSE, ASYNC, SORT = "examples/reverse.yaml", "examples/reverse_async.yaml", "examples/sort.yaml"
ROWS = [
    ("reverse-0", REVERSE, []),
    ("reverse-1", REVERSE, ["trainer.staleness=1"]),
    ("reverse-4", ASYNC, []),
    ("reverse-4-grpo", REVERSE, ["trainer.staleness=4"]),
    ("reverse-4-grpo-slow", REVERSE, ["trainer.staleness=4", "trainer.learning_rate=0.0003"]),
    ("sort-grpo", SORT, []),
    ("sort-ppo", SORT, ["algorithm.name=ppo"]),
]
WINDOW = 10


def seconds_until(rows, pass_rate):
    """Seconds of steps until the mean pass rate of the last WINDOW steps reached `pass_rate`; None if it never did."""
    seconds = 0.0
    for i, row in enumerate(rows):
        seconds += row["step_seconds"]
        window = rows[max(0, i + 1 - WINDOW):i + 1]
        if len(window) == WINDOW and sum(r["pass_rate"] for r in window) / WINDOW >= pass_rate:
            return round(seconds, 1)
    return None


def summary(directory):
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    tokens = [sum(row["staleness_histogram"][age] for row in rows) for age in range(len(rows[0]["staleness_histogram"]))]
    ledger = sqlite3.connect(f"file:{directory}/ledger.sqlite?mode=ro", uri=True)
    # The bound that the groups were admitted under.
    staleness, = ledger.execute("SELECT max(staleness) FROM groups").fetchone()
    states = dict(ledger.execute("SELECT state, count(*) FROM groups GROUP BY state"))
    samples, = ledger.execute("SELECT count(*) FROM outcomes").fetchone()
    group_size = int(dict(ledger.execute("SELECT * FROM meta"))["group_size"])
    trained = states.get(2, 0)
    seconds = sum(row["step_seconds"] for row in rows)
    last = rows[-max(1, len(rows) // 10):]
    faults = []
    if sum(tokens[staleness + 1:]) > 0:
        faults.append(f"tokens older than {staleness} versions: {tokens}")
    if samples != trained * group_size or states.get(1, 0) > 0:
        faults.append(f"{samples} samples finished, {trained} groups of {group_size} trained; states {states}")
    return {
        "steps": len(rows), "pass_rate_first": round(rows[0]["pass_rate"], 3),
        "pass_rate_last": round(sum(r["pass_rate"] for r in last) / len(last), 3),
        "held_out": rows[-1].get("eval_pass_rate"), "seconds": round(seconds, 1),
        "reward_per_second": round(sum(r["reward_mean"] for r in rows) * trained / len(rows) * group_size / seconds, 1),
        "seconds_until_0.9": seconds_until(rows, 0.9),
        "staleness_share": [round(t / sum(tokens), 3) for t in tokens[:staleness + 1]],
        "max_abs_mismatch": max(r["max_abs_mismatch"] for r in rows), "groups_dropped": states.get(3, 0),
        "faults": faults}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--bin", default="build/release/bin")
    parser.add_argument("--only", nargs="+", default=[], help="names of rows")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, help="instead of the configuration's")
    parser.add_argument("--run", nargs="+", action="append", default=[], metavar=("NAME CONFIG", "SETTING"),
                        help="a row of your own, instead of the table")
    args = parser.parse_args()
    rows = [(run[0], run[1], run[2:]) for run in args.run] or ROWS
    failed = False
    for name, config, settings in rows:
        if args.only and name not in args.only:
            continue
        for seed in args.seeds:
            work = pathlib.Path(tempfile.mkdtemp(prefix="moerl-learning-"))
            command = [f"{args.bin}/moerl", "run", config]
            for setting in [f"trainer.run_directory={work}/run", f"model.init.seed={seed}", f"task.seed={seed}",
                            f"trainer.seed={seed}", *([f"trainer.num_steps={args.steps}"] if args.steps else []), *settings]:
                command += ["--set", setting]
            with open(work / "out", "wb") as out:
                code = subprocess.run(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, check=False).returncode
            if code != 0:
                sys.exit(f"{name}: moerl run ended with {code}: {work}/out")
            row = {"name": name, "seed": seed, "settings": settings, **summary(work / "run")}
            failed = failed or bool(row["faults"])
            print(json.dumps(row), flush=True)
            shutil.rmtree(work)
    return failed


if __name__ == "__main__":
    sys.exit(main())
