#!/usr/bin/env python3
"""Training beside PyTorch with transformers: same weights, batch, threads and machine, in one run.

    python3 bench/model/against_torch.py [--moerl build/release/bin/moerl] [--threads 1] [--repeats 2] [--rounds 5]

Needs torch and transformers. Forward, backward, clipping and AdamW of a Qwen3-MoE of about 115 M parameters, 8 sequences of 256
tokens, in fp32 and in bf16 (here bf16 weights over fp32 masters; there autocast over fp32 parameters, and on a line of its own
bf16 parameters alone). Of the peer's settings (attention, experts) the fastest counts and is named. Both sides take turns;
medians; the first step of each is not counted.
"""

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
import time

import torch
import transformers

from peer_model import CONFIG, make_model, measure

GOAL = 2.0
SEQUENCES, LENGTH = 8, 256
SETTINGS = [(attention, experts) for attention in ("eager", "sdpa") for experts in ("eager", "grouped_mm")]


def load_model(directory, attention, experts):
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation=attention, experts_implementation=experts)


def clock():
    """As moerl bench: one thread's own time, several threads' wall time."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def step_seconds(model, optimizer, rows, bf16):
    start = clock()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        logits = model(rows, use_cache=False).logits
    logprobs = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, rows[:, 1:, None])
    (-logprobs.sum() / rows.numel()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return clock() - start


class Peer:
    """One setting of transformers, ready to be stepped."""

    def __init__(self, directory, setting, master):
        self.model = load_model(directory, *setting).to(master).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.rows = torch.tensor([[(s * 131 + i * i * 7 + i) % CONFIG["vocab_size"] for i in range(LENGTH)]
                                  for s in range(SEQUENCES)])

    def tokens_per_second(self, bf16):
        return self.rows.numel() / step_seconds(self.model, self.optimizer, self.rows, bf16)


# Comparison -> (our compute type, the peer's parameters, autocast). Like for like are fp32, and bf16 over fp32 masters; bf16
# parameters without masters do less work than we do and lose small updates.
COMPARISONS = {"fp32": ("fp32", torch.float32, False), "bf16": ("bf16", torch.float32, True),
               "bf16_beside_no_masters": ("bf16", torch.bfloat16, False)}


def best_setting(directory, name):
    """The fastest of all settings."""
    _, master, autocast = COMPARISONS[name]
    rates = {}
    for setting in SETTINGS:
        try:
            peer = Peer(directory, setting, master)
            peer.tokens_per_second(autocast)
            rates[setting] = peer.tokens_per_second(autocast)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            print(f"torch {name} {'/'.join(setting)} does not run: {error}", file=sys.stderr)
            continue
        print(f"torch {name} {'/'.join(setting)}: {rates[setting]:.0f} tokens/s", file=sys.stderr, flush=True)
    return max(rates, key=rates.get)


def compare(options, directory, name):
    compute, master, autocast = COMPARISONS[name]
    setting = best_setting(directory, name)
    peer = Peer(directory, setting, master)
    peer.tokens_per_second(autocast)
    ours, theirs = [], []
    for _ in range(options.rounds):  # in turn, so that both meet the same machine
        theirs += [peer.tokens_per_second(autocast) for _ in range(options.repeats)]
        ours.append(measure(options.moerl, f"train_{compute}", options.repeats, options.threads))
    rate, theirs = statistics.median(one["value"] for one in ours), statistics.median(theirs)
    suffix = f"{name}_t{options.threads}"
    kind = f"{setting[0]} attention, {setting[1]} experts"
    lines = [{"name": f"torch_train_{suffix}", "value": theirs, "reference": kind, "ratio": None, "goal": None},
             {"name": f"train_{suffix}_of_peak", "value": rate, "reference": ours[0]["reference"],
              "ratio": statistics.median(one["ratio"] for one in ours), "goal": ours[0]["goal"]},
             {"name": f"train_{suffix}", "value": rate, "ratio": rate / theirs, "goal": GOAL,
              "reference": f"torch {torch.__version__}, transformers {transformers.__version__}"}]
    for line in lines:
        print(json.dumps({**line, "unit": "tokens/s", "better": "higher"}), flush=True)


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--moerl", default="build/release/bin/moerl")
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--repeats", type=int, default=2, help="steps of a turn")
    arguments.add_argument("--rounds", type=int, default=5, help="turns of each side")
    arguments.add_argument("--only", choices=COMPARISONS)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        directory = make_model(options.moerl, pathlib.Path(temporary), "fp32")
        for name in COMPARISONS if options.only is None else (options.only,):
            compare(options, directory, name)


if __name__ == "__main__":
    main()
