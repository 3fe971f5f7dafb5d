#!/usr/bin/env python3
"""Compares the fp32 logits of two model directories in transformers; exits 1 if they differ by more than --limit."""

import argparse
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXTS = ("The capital of France is Paris, and that of Italy is Rome.",
         "<|im_start|>user\nWhat is 12 + 7?<|im_end|>\n<|im_start|>assistant\n12 + 7 = 19.<|im_end|>\n",
         "def reverse(text):\n    return text[::-1]\n")


def logits(directory, batch):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(tokens).logits[0] for tokens in batch]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", help="has the tokenizer too")
    parser.add_argument("second")
    parser.add_argument("--limit", type=float, default=1e-4)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.first)
    batch = [tokenizer(text, return_tensors="pt").input_ids for text in TEXTS]
    pairs = list(zip(logits(arguments.first, batch), logits(arguments.second, batch)))
    difference = max(float((a - b).abs().max()) for a, b in pairs)
    largest = max(float(a.abs().max()) for a, _ in pairs)
    print(f"largest difference {difference:.2e} over {sum(len(a) for a, _ in pairs)} positions; logits reach {largest:.1f}")
    sys.exit(difference > arguments.limit)
