#!/usr/bin/env python3
"""Golden log-probabilities and gradients of every supported architecture, from transformers and PyTorch in fp32.

    python3 model_golden.py OUT_DIR

writes OUT_DIR/<case>/ with the model as transformers saves it (config.json, model.safetensors in bf16, so that fp32 and
bf16 hold the same values) and golden.safetensors:

    tokens [T] i32, offsets [N+1] i64   packed sequences
    logprobs [T] f32                    of each token given its prefix, 0 for a sequence's first
    d_logprobs [T] f32                  the weights of L = sum d_logprobs * logprobs
    grad.<name> i16, scale.<name> f32   dL/d<name> = grad * scale / 32767, by Hugging Face name
    experts_without_tokens [1] i64      over all layers

Attention is eager. A case whose router chooses an expert by less than 1e-4 in probability or logit (in score plus bias where scores
are sigmoids) is drawn again, so that rounding cannot change a choice. The versions used are in the metadata of golden.safetensors.
"""

import json
import pathlib
import sys

import numpy
import torch
import transformers
from safetensors.torch import save_file

MARGIN = 1e-4

SMALL = dict(vocab_size=53, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=40, max_position_embeddings=512, bos_token_id=None, eos_token_id=None, pad_token_id=None)
ODD = dict(SMALL, vocab_size=41, hidden_size=20, num_attention_heads=5, num_key_value_heads=1, head_dim=6, intermediate_size=27)
WIDE = dict(SMALL, vocab_size=67, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2, intermediate_size=33)
LONG = dict(SMALL, hidden_size=16, num_attention_heads=2, num_key_value_heads=1, intermediate_size=20, max_position_embeddings=4096)

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


def cases():
    c = transformers
    moe = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12)
    lengths = [17, 1, 70, 30]
    yield "llama_small", c.LlamaConfig(**SMALL), lengths
    yield "llama_bias_llama3", c.LlamaConfig(**ODD, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3), lengths
    yield "llama_tied_linear", c.LlamaConfig(**WIDE, tie_word_embeddings=True, rope_parameters=LINEAR), lengths
    yield "qwen2_small", c.Qwen2Config(**SMALL), lengths
    yield "qwen2_tied_yarn", c.Qwen2Config(**ODD, tie_word_embeddings=True, rope_parameters=YARN), [140, 9]
    yield "qwen2_wide", c.Qwen2Config(**WIDE), lengths
    yield "qwen3_small", c.Qwen3Config(**SMALL, head_dim=8), lengths
    yield "qwen3_odd_bias", c.Qwen3Config(**ODD, attention_bias=True), lengths
    yield "qwen3_tied", c.Qwen3Config(**WIDE, head_dim=10, tie_word_embeddings=True), lengths
    yield "mixtral_small", c.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2), lengths
    yield "mixtral_odd", c.MixtralConfig(**ODD, num_local_experts=5, num_experts_per_tok=3), lengths
    yield "mixtral_unused_experts", c.MixtralConfig(**dict(SMALL, intermediate_size=10), num_local_experts=24,
                                                        num_experts_per_tok=2), [5, 6]
    yield "qwen2_moe_small", c.Qwen2MoeConfig(**SMALL, **moe, shared_expert_intermediate_size=16), lengths
    yield "qwen2_moe_norm", c.Qwen2MoeConfig(**WIDE, **moe, shared_expert_intermediate_size=9, norm_topk_prob=True,
                                             decoder_sparse_step=2), lengths
    yield "qwen2_moe_unused_experts", c.Qwen2MoeConfig(**dict(SMALL, hidden_size=16), num_experts=32, num_experts_per_tok=2,
                                                       moe_intermediate_size=6, shared_expert_intermediate_size=12,
                                                       qkv_bias=False), [4, 3]
    yield "qwen3_moe_small", c.Qwen3MoeConfig(**SMALL, **moe, norm_topk_prob=True, head_dim=6), lengths
    yield "qwen3_moe_mixed_layers", c.Qwen3MoeConfig(**WIDE, num_experts=7, num_experts_per_tok=3, moe_intermediate_size=11,
                                                     mlp_only_layers=[1], attention_bias=True, head_dim=10), lengths
    yield "qwen3_moe_unused_experts", c.Qwen3MoeConfig(**ODD, num_experts=40, num_experts_per_tok=2, moe_intermediate_size=6,
                                                       norm_topk_prob=True, rope_parameters=YARN), [6, 5]
    yield "qwen3_moe_long", c.Qwen3MoeConfig(**LONG, num_experts=4, num_experts_per_tok=1, moe_intermediate_size=8,
                                             head_dim=8), [2060]
    yield "olmoe_small", c.OlmoeConfig(**SMALL, num_experts=6, num_experts_per_tok=2), lengths
    yield "olmoe_clip", c.OlmoeConfig(**dict(WIDE, intermediate_size=14), num_experts=8, num_experts_per_tok=4, clip_qkv=0.9,
                                      norm_topk_prob=True), lengths
    yield "olmoe_unused_experts", c.OlmoeConfig(**dict(SMALL, intermediate_size=8), num_experts=30, num_experts_per_tok=1), [4, 4]
    glm = dict(num_experts_per_tok=2, first_k_dense_replace=1)
    yield "glm4_moe_small", c.Glm4MoeConfig(**SMALL, **glm, head_dim=8, n_routed_experts=6, moe_intermediate_size=12,
                                            routed_scaling_factor=1.5, use_qk_norm=True, attention_bias=True), lengths
    yield "glm4_moe_odd", c.Glm4MoeConfig(**dict(ODD, head_dim=10, num_experts_per_tok=3), n_routed_experts=7, moe_intermediate_size=9,
                                          n_shared_experts=2, norm_topk_prob=False, first_k_dense_replace=0,
                                          rope_parameters=dict(YARN, partial_rotary_factor=0.6)), [140, 9]
    yield "glm4_moe_unused_experts", c.Glm4MoeConfig(**dict(WIDE, hidden_size=16), **glm, n_routed_experts=40, moe_intermediate_size=6,
                                                     routed_scaling_factor=2.5, tie_word_embeddings=True), [6, 5]
    yield "glm4_moe_long", c.Glm4MoeConfig(**LONG, **glm, head_dim=8, n_routed_experts=4, moe_intermediate_size=8,
                                           rope_parameters={"rope_type": "default", "rope_theta": 1e6}), [2060]


def randomise(model, generator):
    """Weights large enough that attention and routing are far from uniform, rounded to bf16."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:
                centre = 1.0 if "norm" in name else 0.0
                p.copy_(centre + 0.2 * torch.randn(p.shape, generator=generator))
            else:
                scale = 0.5 if "embed" in name else 1.0 / p.shape[-1] ** 0.5
                p.copy_(scale * torch.randn(p.shape, generator=generator))
            p.copy_(p.to(torch.bfloat16).to(torch.float32))
        for name, b in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # stays fp32, also in files
                b.copy_(0.2 * torch.randn(b.shape, generator=generator))


def router_margin(logits_by_layer, k):
    """The least distance, in logit and in probability (or in biased sigmoid score), between the last expert chosen and the first
    one not chosen."""
    margin = float("inf")
    for router, logits in logits_by_layer:
        bias = getattr(router, "e_score_correction_bias", None)
        for values in (logits, torch.softmax(logits, -1)) if bias is None else (logits.sigmoid() + bias,):
            top = torch.topk(values, min(k + 1, values.shape[-1]), dim=-1).values
            if top.shape[-1] > k:
                margin = min(margin, float((top[:, k - 1] - top[:, k]).min()))
    return margin


def per_file_gradients(model, config):
    """Gradients by the names of the file, where each expert's matrices are tensors of their own."""
    mixtral = config.model_type == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    out = {}
    for name, p in model.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        block = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
        if name.endswith("experts.gate_up_proj"):
            for e in range(grad.shape[0]):
                first, second = grad[e].chunk(2, dim=0)
                out[block.replace("gate_up_proj", f"{e}.{gate}.weight")] = first
                out[block.replace("gate_up_proj", f"{e}.{up}.weight")] = second
        elif name.endswith("experts.down_proj"):
            for e in range(grad.shape[0]):
                out[block.replace("down_proj", f"{e}.{down}.weight")] = grad[e]
        else:
            out[block] = grad
    return out


def make_case(name, config, lengths, out_dir):
    config._attn_implementation = "eager"
    k = getattr(config, "num_experts_per_tok", 0)
    for seed in range(1000):
        generator = torch.Generator().manual_seed(seed * 7919 + sum(map(ord, name)))
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
        model = model.float().eval()
        randomise(model, generator)
        logits_by_layer = []
        for module in model.modules():
            if module.__class__.__name__.lower().endswith("topkrouter"):
                module.register_forward_hook(lambda _m, _i, o: logits_by_layer.append((_m, o[0].detach(), o[2].detach())))
        tokens = [torch.randint(config.vocab_size, (n,), generator=generator) for n in lengths]
        d = [torch.randn(n, generator=generator) for n in lengths]
        logprobs, loss = [], 0.0
        for t, w in zip(tokens, d):
            w[0] = 0.0
            logp = torch.log_softmax(model(t[None]).logits[0], -1)
            chosen = torch.cat([torch.zeros(1), logp[:-1].gather(1, t[1:, None])[:, 0]])
            logprobs.append(chosen.detach())
            loss = loss + (chosen * w).sum()
        if k and router_margin([(m, l) for m, l, _ in logits_by_layer], k) < MARGIN:
            continue
        break
    else:
        raise SystemExit(f"{name}: no seed gives a router margin of {MARGIN}")
    loss.backward()
    used = {}
    for module, logits, ids in logits_by_layer:
        used.setdefault(id(module), (logits.shape[-1], set()))[1].update(ids.flatten().tolist())
    unused = sum(n - len(s) for n, s in used.values())

    directory = out_dir / name
    directory.mkdir(parents=True, exist_ok=True)
    golden = {
        "tokens": torch.cat(tokens).to(torch.int32),
        "offsets": torch.tensor([0] + list(numpy.cumsum(lengths)), dtype=torch.int64),
        "logprobs": torch.cat(logprobs).float(),
        "d_logprobs": torch.cat(d).float(),
        "experts_without_tokens": torch.tensor([unused], dtype=torch.int64),
    }
    for parameter, grad in per_file_gradients(model, config).items():
        scale = float(grad.abs().max())
        golden[f"grad.{parameter}"] = torch.round(grad / (scale or 1.0) * 32767).to(torch.int16)
        golden[f"scale.{parameter}"] = torch.tensor([scale])
    versions = {"generator": "tests/golden/model_golden.py", "torch": torch.__version__,
                "transformers": transformers.__version__, "seed": str(seed)}
    save_file(golden, directory / "golden.safetensors", metadata=versions)
    biases = {n: b.clone() for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    model.to(torch.bfloat16)
    for buffer, bias in biases.items():
        module, _, leaf = buffer.rpartition(".")
        setattr(model.get_submodule(module), leaf, torch.nn.Buffer(bias))
    model.save_pretrained(directory)
    for extra in directory.glob("generation_config.json"):
        extra.unlink()
    print(json.dumps({"case": name, "seed": seed, "unused_experts": unused,
                      "parameters": sum(p.numel() for p in model.parameters())}))


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    out_dir = pathlib.Path(sys.argv[1])
    for name, config, lengths in cases():
        make_case(name, config, lengths, out_dir)


if __name__ == "__main__":
    main()
