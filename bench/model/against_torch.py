#!/usr/bin/env python3
"""Training beside PyTorch with transformers: same weights, batch, threads and machine, in one run.

    python3 bench/model/against_torch.py [--moerl build/release/bin/moerl] [--threads 1] [--repeats 5]

Needs torch and transformers. Prints moerl's JSON lines for training with PyTorch's tokens/s as the reference: forward,
backward and AdamW of a Qwen3-MoE of about 115 M parameters, 8 sequences of 256 tokens, fp32, and bf16 (autocast over fp32
parameters there; bf16 weights over fp32 masters here). Medians; the first step is not counted.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile
import time

import torch
import transformers

GOAL = 2.0
SEQUENCES, LENGTH = 8, 256

# moerl's BenchConfig (libs/model/model_bench.cc).
CONFIG = {
    "model_type": "qwen3_moe", "vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096, "num_experts": 32, "num_experts_per_tok": 4,
    "moe_intermediate_size": 256, "norm_topk_prob": True, "intermediate_size": 256,
}


def make_model(moerl, directory, experts):
    (directory / "config.json").write_text(json.dumps(CONFIG))
    subprocess.run([moerl, "init", "--config", directory / "config.json", "--seed", "1", "--compute", "fp32", "--out",
                    directory / "model"], check=True, stdout=subprocess.DEVNULL)
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory / "model", dtype=torch.float32, attn_implementation="sdpa", experts_implementation=experts)


def clock():
    """As moerl bench: one thread's own time, several threads' wall time."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def torch_tokens_per_second(model, bf16, repeats):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    rows = torch.tensor([[(s * 131 + i * i * 7 + i) % CONFIG["vocab_size"] for i in range(LENGTH)] for s in range(SEQUENCES)])
    seconds = []
    for step in range(repeats + 1):
        start = clock()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            logits = model(rows).logits
        logprobs = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, rows[:, 1:, None])
        (-logprobs.sum() / rows.numel()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step > 0:
            seconds.append(clock() - start)
    return rows.numel() / statistics.median(seconds)


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--moerl", default="build/release/bin/moerl")
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--repeats", type=int, default=5)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    transformers.utils.logging.disable_progress_bar()

    peers = {}
    with tempfile.TemporaryDirectory() as directory:
        for experts in ("eager", "grouped_mm"):  # whichever is faster counts
            model = make_model(options.moerl, pathlib.Path(directory), experts)
            for name, bf16 in (("fp32", False), ("bf16", True)):
                try:
                    rate = torch_tokens_per_second(model, bf16, options.repeats)
                except RuntimeError as error:
                    print(json.dumps({"skipped": f"torch {experts} {name}: {error}"}))
                    continue
                peers[name] = max(peers.get(name, 0.0), rate)
    lines = subprocess.run([options.moerl, "bench", "model", "--json", "--threads", str(options.threads), "--repeats",
                            str(options.repeats)], check=True, capture_output=True, text=True).stdout.splitlines()
    for line in map(json.loads, lines):
        name = line["name"].removeprefix("train_")
        if line["name"].startswith("train_") and name in peers:
            line.update(reference=f"torch {torch.__version__} with transformers {transformers.__version__}",
                        ratio=line["value"] / peers[name], goal=GOAL)
            print(json.dumps(line))
            print(json.dumps({"name": f"torch_train_{name}", "value": peers[name], "unit": "tokens/s", "reference": "",
                              "ratio": None, "goal": None, "better": "higher"}))


if __name__ == "__main__":
    main()
