#!/usr/bin/env python3
"""Where the time of a step goes: parts of the wall clock by the trainer's own account, CPU time by process.

  bench/step_profile.py --bin build/release/bin --config examples/reverse.yaml --steps 60

Runs `moerl run` and reads /proc of its children while it lasts. Prints one JSON line a figure, each a mean over the
steps after the first tenth, and the share of a step that it is; peak memory is that of the whole run, which
--run-directory keeps.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def children(parent):
    """(name, CPU seconds, peak memory in bytes) of every child of a process."""
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            command = [c.decode() for c in (entry / "cmdline").read_bytes().split(b"\0") if c]
            status = (entry / "status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) != parent or not command:
            continue
        name = os.path.basename(command[0]).removeprefix("moerl-")
        for setting in command:
            if setting.startswith(("trainer.rank=", "rollout.worker=")):
                name += "-" + setting.split("=")[1]
        peak = next((int(l.split()[1]) * 1024 for l in status.splitlines() if l.startswith("VmHWM")), 0)
        yield name, (int(fields[11]) + int(fields[12])) / TICKS_PER_S, peak


def last_step(path):
    try:
        return json.loads(path.read_text().splitlines()[-1])["step"]
    except (FileNotFoundError, IndexError, json.JSONDecodeError):
        return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--bin", default="build/release/bin")
    parser.add_argument("--config", default="examples/reverse.yaml")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--run-directory", type=pathlib.Path, help="keep the run here; must not exist")
    args = parser.parse_args()
    work = pathlib.Path(tempfile.mkdtemp(prefix="moerl-profile-"))
    directory = args.run_directory or work / "run"
    if directory.exists():
        sys.exit(f"{directory} exists: name a run directory that does not")
    settings = [f"trainer.run_directory={directory}", f"trainer.num_steps={args.steps}",
                f"trainer.checkpoint_every_steps={args.steps}", *args.set]
    command = [f"{args.bin}/moerl", "run", args.config]
    for setting in settings:
        command += ["--set", setting]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    first, begin, end, peaks = max(1, args.steps // 10), {}, {}, {}
    while process.poll() is None:
        step = last_step(directory / "metrics.jsonl")
        seen = {}
        for name, cpu, peak in children(process.pid):
            seen[name] = cpu
            peaks[name] = max(peak, peaks.get(name, 0))
        if step >= first and not begin:
            begin, first = seen, step
        if first <= step < args.steps and begin:
            end, last = seen, step
        time.sleep(0.05)
    if process.returncode != 0 or not end:
        sys.exit(f"moerl run ended with {process.returncode}; see {directory}/logs")
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if first < row["step"] <= last]
    mean = lambda key: sum(row[key] for row in rows) / len(rows)
    step_s = mean("step_seconds")

    def say(name, value, unit, share=None):
        line = {"name": f"step_profile/{name}", "value": round(value, 4), "unit": unit, "better": "lower"}
        if share is not None:
            line["share_of_step"] = round(share, 3)
        print(json.dumps(line))

    say("step", step_s, "s")
    for part in ("wait", "train", "publish"):
        say(f"trainer/{part}", mean(f"{part}_seconds"), "s", mean(f"{part}_seconds") / step_s)
    for name in sorted(end):
        cpu = (end[name] - begin.get(name, 0.0)) / (last - first)
        say(f"cpu/{name}", cpu, "s", cpu / step_s)
        say(f"peak_memory/{name}", peaks[name] / 2**20, "MiB")
    say("trained_tokens", mean("trained_tokens"), "tokens")
    shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
