#!/usr/bin/env python3
"""Training beside PyTorch with transformers: same weights, batch, threads and machine, in one run.

    python3 bench/model/against_torch.py [--moerl build/release/bin/moerl] [--threads 1] [--repeats 3] [--rounds 3]

Needs torch and transformers. Forward, backward, clipping and AdamW of a Qwen3-MoE of about 115 M parameters, 8 sequences of 256
tokens, in fp32 and in bf16 (here bf16 weights over fp32 masters; there autocast over fp32 parameters, or bf16 parameters
alone). Of the peer's settings (attention, experts, precision) the fastest counts and is named. Both sides take turns; medians;
the first step of each is not counted.
"""

import argparse
import json
import pathlib
import statistics
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


# Compute type -> (peer's parameters, autocast): bf16 parameters without fp32 masters do less work than ours, in the peer's favour.
MODES = {"fp32": [(torch.float32, False)], "bf16": [(torch.float32, True), (torch.bfloat16, False)]}


def best_peer(directory, name):
    """The fastest of all settings, its name and whether it runs under autocast."""
    best = (0.0, None)
    for master, autocast in MODES[name]:
        for setting in SETTINGS:
            kind = "/".join(setting) + (", autocast" if autocast else f", {str(master).removeprefix('torch.')} parameters")
            try:
                peer = Peer(directory, setting, master)
                peer.tokens_per_second(autocast)
                rate = max(peer.tokens_per_second(autocast) for _ in range(2))
            except (RuntimeError, ValueError, NotImplementedError) as error:
                print(json.dumps({"skipped": f"torch {name} {kind}: {error}"}), flush=True)
                continue
            print(json.dumps({"tried": f"torch {name} {kind}", "value": rate}), flush=True)
            if rate > best[0]:
                best = (rate, (setting, master, autocast, kind))
            del peer
    return best[1]


def compare(options, directory, name):
    setting, master, autocast, kind = best_peer(directory, name)
    peer = Peer(directory, setting, master)
    peer.tokens_per_second(autocast)
    ours, theirs = [], []
    for _ in range(options.rounds):  # in turn, so that both meet the same machine
        theirs += [peer.tokens_per_second(autocast) for _ in range(options.repeats)]
        ours.append(measure(options.moerl, f"train_{name}", options.repeats, options.threads))
    line = ours[0]
    rate, theirs = statistics.median(one["value"] for one in ours), statistics.median(theirs)
    threads = f"_t{options.threads}" if options.threads > 1 else ""
    print(json.dumps({"name": f"torch_train_{name}{threads}", "value": theirs, "unit": "tokens/s", "reference": kind,
                      "ratio": None, "goal": None, "better": "higher"}), flush=True)
    print(json.dumps({"name": f"train_{name}{threads}_of_peak", "value": rate, "unit": "tokens/s", "reference": line["reference"],
                      "ratio": statistics.median(one["ratio"] for one in ours), "goal": line["goal"], "better": "higher"}))
    print(json.dumps({"name": f"train_{name}{threads}", "value": rate, "unit": "tokens/s",
                      "reference": f"torch {torch.__version__} with transformers {transformers.__version__}",
                      "ratio": rate / theirs, "goal": GOAL, "better": "higher"}), flush=True)


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--moerl", default="build/release/bin/moerl")
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--repeats", type=int, default=3, help="steps of a turn")
    arguments.add_argument("--rounds", type=int, default=3, help="turns of each side")
    arguments.add_argument("--only", choices=("fp32", "bf16"))
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        directory = make_model(options.moerl, pathlib.Path(temporary), "fp32")
        for name in ("fp32", "bf16") if options.only is None else (options.only,):
            compare(options, directory, name)


if __name__ == "__main__":
    main()
