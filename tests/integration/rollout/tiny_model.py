"""Writes a Hugging Face directory with a small random Qwen3-MoE: config.json and model.safetensors, by hand."""

import json
import os
import random
import struct
from array import array

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 40, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "torch_dtype": "float32",
}


def _shapes():
    hidden, moe, vocab = CONFIG["hidden_size"], CONFIG["moe_intermediate_size"], CONFIG["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{prefix}self_attn.{name}.weight", (hidden, hidden)
        for name in ("q_norm", "k_norm"):
            yield f"{prefix}self_attn.{name}.weight", (CONFIG["head_dim"],)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", (hidden,)
        yield f"{prefix}mlp.gate.weight", (CONFIG["num_experts"], hidden)
        for expert in range(CONFIG["num_experts"]):
            for name, shape in (("gate_proj", (moe, hidden)), ("up_proj", (moe, hidden)), ("down_proj", (hidden, moe))):
                yield f"{prefix}mlp.experts.{expert}.{name}.weight", shape
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def write(directory, seed=1):
    dice = random.Random(seed)
    header, data = {}, array("f")
    for name, shape in _shapes():
        begin = len(data) * 4
        count = 1
        for size in shape:
            count *= size
        data.extend([1.0] * count if len(shape) == 1 else [dice.gauss(0, 0.2) for _ in range(count)])
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, len(data) * 4]}
    text = json.dumps(header).encode()
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, "config.json"), "w") as file:
        json.dump(CONFIG, file)
    with open(os.path.join(directory, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data.tobytes())
    return directory
