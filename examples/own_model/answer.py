#!/usr/bin/env python3
"""Asks a model directory with transformers: prints its greedy answers to the first held-out prompts."""

import argparse
import itertools
import json

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from reward import CHAT  # the same template as in training

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--prompts", required=True, help="JSON lines")
    parser.add_argument("--count", type=int, default=8)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    with open(arguments.prompts) as lines:
        for row in map(json.loads, itertools.islice(lines, arguments.count)):
            prompt = tokenizer(CHAT.format(row["text"]), return_tensors="pt", add_special_tokens=False)
            with torch.no_grad():
                out = model.generate(**prompt, max_new_tokens=16, do_sample=False)
            answer = tokenizer.decode(out[0][prompt.input_ids.shape[1]:], skip_special_tokens=True)
            print(f"{row['text']}  {answer!r}")
