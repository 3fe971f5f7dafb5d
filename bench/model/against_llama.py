#!/usr/bin/env python3
"""Generation beside llama.cpp (llama-cpp-python): same weights in bf16, one thread, same machine, in one run.

    python3 bench/model/against_llama.py [--moerl build/release/bin/moerl] [--repeats 5]

Needs llama-cpp-python, gguf and numpy. Writes the model of `moerl bench model` as GGUF (qwen3moe) and decodes 64 tokens for 1, 8
and 32 sequences with llama_decode alone: its sampling is not counted, ours is. Of llama.cpp's settings (flash attention, unified
cache) the fastest counts and is named. Both sides are timed by the CPU time of their one thread and take turns; medians.
"""

import argparse
import ctypes
import json
import math
import pathlib
import statistics
import subprocess
import tempfile
import time

import gguf
import llama_cpp
import numpy

from peer_model import CONFIG, make_model, measure

GOALS = {1: 1.2, 8: 1.8, 32: 3.5}
PROMPT, NEW_TOKENS = 8, 64


def tensors_of(directory):
    """Name -> array of 16-bit words, from a safetensors file in bf16."""
    data = (directory / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:8 + size]).items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "BF16", entry
        begin, end = (8 + size + at for at in entry["data_offsets"])
        yield name, numpy.frombuffer(data[begin:end], numpy.uint16).reshape(entry["shape"])


def write_gguf(directory, path):
    tensors = dict(tensors_of(directory))
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_expert_feed_forward_length(CONFIG["moe_intermediate_size"])
    writer.add_expert_count(CONFIG["num_experts"])
    writer.add_expert_used_count(CONFIG["num_experts_per_tok"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_key_length(CONFIG["head_dim"])
    writer.add_value_length(CONFIG["head_dim"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(CONFIG["vocab_size"])
    writer.add_tokenizer_model("none")

    def matrix(name, words):
        writer.add_tensor(name, numpy.ascontiguousarray(words).view(numpy.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)

    def fp32(name, words):
        writer.add_tensor(name, (words.astype(numpy.uint32) << 16).view(numpy.float32))

    matrix("token_embd.weight", tensors["model.embed_tokens.weight"])
    matrix("output.weight", tensors["lm_head.weight"])
    fp32("output_norm.weight", tensors["model.norm.weight"])
    for layer in range(CONFIG["num_hidden_layers"]):
        source, to = f"model.layers.{layer}.", f"blk.{layer}."
        for ours, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output")):
            matrix(f"{to}attn_{theirs}.weight", tensors[f"{source}self_attn.{ours}_proj.weight"])
        for ours, theirs in (("self_attn.q_norm", "attn_q_norm"), ("self_attn.k_norm", "attn_k_norm"),
                             ("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm"),
                             ("mlp.gate", "ffn_gate_inp")):
            fp32(f"{to}{theirs}.weight", tensors[f"{source}{ours}.weight"])
        for part in ("gate", "up", "down"):
            matrix(f"{to}ffn_{part}_exps.weight", numpy.stack(
                [tensors[f"{source}mlp.experts.{e}.{part}_proj.weight"] for e in range(CONFIG["num_experts"])]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Llama:
    """A loaded model and one context for `sequences` sequences."""

    def __init__(self, model, sequences, flash, unified):
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = sequences * 128
        params.n_batch = params.n_ubatch = max(512, sequences * PROMPT)
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = 1 if flash else 0
        params.kv_unified = unified
        self.sequences = sequences
        self.context = llama_cpp.llama_init_from_model(model, params)
        if not self.context:
            raise RuntimeError("llama.cpp made no context")
        self.batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)

    def close(self):
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)

    def fill(self, rows):
        """rows: (token, position, sequence, wants logits)"""
        self.batch.n_tokens = len(rows)
        for i, (token, position, sequence, logits) in enumerate(rows):
            self.batch.token[i] = token
            self.batch.pos[i] = position
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = sequence
            self.batch.logits[i] = logits

    def decode(self):
        if llama_cpp.llama_decode(self.context, self.batch) != 0:
            raise RuntimeError("llama_decode failed")
        return llama_cpp.llama_get_logits_ith(self.context, -1)

    def start(self):
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        self.fill([(1 + s if i == 0 else 1 + i, i, s, i + 1 == PROMPT)
                   for s in range(self.sequences) for i in range(PROMPT)])
        self.decode()

    def tokens_per_second(self):
        self.start()
        generator = numpy.random.default_rng(1)
        seconds = 0.0
        for step in range(NEW_TOKENS):
            tokens = generator.integers(0, CONFIG["vocab_size"], self.sequences)
            self.fill([(int(tokens[s]), PROMPT + step, s, True) for s in range(self.sequences)])
            begin = time.thread_time()
            self.decode()
            seconds += time.thread_time() - begin
        return self.sequences * NEW_TOKENS / seconds


def log_probability(model, tokens):
    """Sum of log-probabilities of tokens, to see that both sides compute the same model."""
    llama = Llama(model, 1, False, True)
    total = 0.0
    for position, token in enumerate(tokens[:-1]):
        llama.fill([(token, position, 0, True)])
        logits = numpy.array(llama.decode()[:CONFIG["vocab_size"]], numpy.float64)
        total += logits[tokens[position + 1]] - logits.max() - math.log(numpy.exp(logits - logits.max()).sum())
    llama.close()
    return total


def check_same_model(moerl, directory, model):
    tokens = [(i * i * 7 + i) % CONFIG["vocab_size"] for i in range(24)]
    printed = subprocess.run([moerl, "logprobs", "--model", directory, "--compute", "bf16"], check=True, text=True,
                             input=json.dumps({"tokens": tokens}), capture_output=True).stdout
    ours, theirs = sum(json.loads(printed)["logprobs"][1:]), log_probability(model, tokens)
    if abs(ours - theirs) > 1e-2 * abs(ours):
        raise SystemExit(f"against_llama: the sides disagree on a text's log-probability: {ours} and {theirs}")


def best_setting(model, sequences):
    rates = {}
    for flash in (False, True):
        for unified in (False, True):
            llama = Llama(model, sequences, flash, unified)
            llama.tokens_per_second()
            rates[flash, unified] = llama.tokens_per_second()
            llama.close()
    return max(rates, key=rates.get)


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--moerl", default="build/release/bin/moerl")
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--only", type=int, choices=GOALS, help="this number of sequences")
    options = arguments.parse_args()
    quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    with tempfile.TemporaryDirectory() as temporary:
        directory = make_model(options.moerl, pathlib.Path(temporary), "bf16")
        path = pathlib.Path(temporary) / "model.gguf"
        write_gguf(directory, path)
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not model:
            raise SystemExit("against_llama: llama.cpp does not load the model")
        check_same_model(options.moerl, directory, model)
        for sequences, goal in GOALS.items():
            if options.only not in (None, sequences):
                continue
            flash, unified = best_setting(model, sequences)
            llama = Llama(model, sequences, flash, unified)
            name = f"generate_bf16_n{sequences}"
            ours, theirs = [], []
            for _ in range(options.repeats):
                theirs.append(llama.tokens_per_second())
                ours.append(measure(options.moerl, name, 3)["value"])
            llama.close()
            setting = f"flash attention {'on' if flash else 'off'}, {'unified' if unified else 'separate'} caches"
            peer = statistics.median(theirs)
            print(json.dumps({"name": f"llama_{name}", "value": peer, "unit": "tokens/s", "reference": setting, "ratio": None,
                              "goal": None, "better": "higher"}), flush=True)
            print(json.dumps({"name": name, "value": statistics.median(ours), "unit": "tokens/s",
                              "reference": f"llama-cpp-python {llama_cpp.__version__}",
                              "ratio": statistics.median(a / b for a, b in zip(ours, theirs)), "goal": goal,
                              "better": "higher"}), flush=True)


if __name__ == "__main__":
    main()
