"""The model that moerl and its peers are measured on, and moerl's own side of a comparison."""

import json
import subprocess

# moerl's BenchConfig (libs/model/model_bench.cc).
CONFIG = {
    "model_type": "qwen3_moe", "vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096, "num_experts": 32, "num_experts_per_tok": 4,
    "moe_intermediate_size": 256, "norm_topk_prob": True, "intermediate_size": 256,
}


def make_model(moerl, directory, compute):
    """Writes the random model in a compute type; returns its directory."""
    (directory / "config.json").write_text(json.dumps(CONFIG))
    subprocess.run([moerl, "init", "--config", directory / "config.json", "--seed", "1", "--compute", compute, "--out",
                    directory / "model"], check=True, stdout=subprocess.DEVNULL)
    return directory / "model"


def measure(moerl, name, repeats, threads=1):
    """One line of `moerl bench model`."""
    printed = subprocess.run([moerl, "bench", "model", "--json", "--only", name, "--repeats", str(repeats), "--threads",
                              str(threads)], check=True, capture_output=True, text=True).stdout
    (line,) = [line for line in map(json.loads, printed.splitlines()) if line["name"] == name]
    return line
