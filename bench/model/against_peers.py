#!/usr/bin/env python3
"""moerl beside PyTorch with transformers, llama.cpp and oneDNN on this machine: a table, and all lines as JSON.

    "$(scripts/python-env bench/model/requirements.txt)" bench/model/against_peers.py [--out FILE.jsonl] [--threads 1]

Runs against_torch.py, against_llama.py and against_onednn.py one after the other, about 20 minutes on a quiet core. A peer may
live in another environment: --torch-python, --llama-python and --onednn-python name its interpreter.
"""

import argparse
import json
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent


def lines_of(python, script, *options):
    with subprocess.Popen([python, HERE / script, *options], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode != 0:
        raise SystemExit(f"against_peers: {script} ended with {process.returncode}")


def row(line):
    number = lambda value, form: "" if value is None else format(value, form)  # noqa: E731
    return (f"{line['name']:42} {line['value']:10.1f} {line['unit']:9} {number(line['ratio'], '6.2f'):>6} "
            f"{number(line['goal'], '5.2f'):>5}  {line['reference']}")


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--moerl", default="build/release/bin/moerl")
    arguments.add_argument("--threads", type=int, default=1, help="of training; generation and GEMM take one")
    arguments.add_argument("--out", type=pathlib.Path, help="also write the JSON lines here")
    arguments.add_argument("--onednn-library", help="libdnnl.so.3, where it is not in the environment")
    for peer in ("torch", "llama", "onednn"):
        arguments.add_argument(f"--{peer}-python", default=sys.executable)
    options = arguments.parse_args()
    moerl = ("--moerl", options.moerl)
    library = () if options.onednn_library is None else ("--library", options.onednn_library)
    runs = [(options.torch_python, "against_torch.py", *moerl, "--threads", str(options.threads)),
            (options.llama_python, "against_llama.py", *moerl),
            (options.onednn_python, "against_onednn.py", *moerl, *library)]
    print(f"{'name':42} {'value':>10} {'unit':9} {'ratio':>6} {'goal':>5}  beside")
    lines = []
    for run in runs:
        for line in lines_of(*run):
            lines.append(line)
            print(row(line), flush=True)
    if options.out is not None:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
