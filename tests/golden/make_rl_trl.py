#!/usr/bin/env python3
"""Writes rl_trl.json: losses and their gradients from TRL's own GRPOTrainer and from PyTorch autograd.

    pip install torch==2.15.0 trl==1.16.0
    python3 tests/golden/make_rl_trl.py > tests/golden/rl_trl.json

The trainer's loss function runs as it is, on a stand-in for the trainer that returns our log-probabilities instead of
running a model. What TRL does not have (a critic, DPPO, GSPO's token form, decoupled PPO, whitening) is written down in
PyTorch from the papers. Everything is float64.
"""

import collections
import json
import types

import torch
import trl
from trl.trainer.grpo_trainer import GRPOTrainer

torch.manual_seed(20260)
torch.set_default_dtype(torch.float64)

B, T = 6, 9
LENGTHS = [9, 1, 4, 7, 2, 6]
MAX_COMPLETION = 16

mask = torch.zeros(B, T)
for i, length in enumerate(LENGTHS):
    mask[i, :length] = 1
mask[0, 3] = mask[3, 0] = mask[3, 5] = 0  # written by an environment

old = -torch.rand(B, T) * 3 - 0.02
new = torch.clamp(old + 0.35 * torch.randn(B, T), max=-1e-3)
ref = torch.clamp(old + 0.5 * torch.randn(B, T), max=-1e-3)
rollout = torch.clamp(old + 0.3 * torch.randn(B, T), max=-1e-3)
advantages = torch.tensor([1.3, -0.7, 0.4, -1.9, 0.0, 0.8])
entropies = torch.rand(B, T) * 2


class Accelerator:
    num_processes = 1
    sync_gradients = False

    def gather(self, x):
        return x

    def gather_for_metrics(self, x):
        return x

    def reduce(self, x, reduction):
        return x


def trl_case(loss_type, *, low=0.2, high=0.2, level="token", delta=None, beta=0.0, unbiased_kl=False, tis_cap=None, entropy=0.0):
    logp = new.clone().requires_grad_(True)
    entropy_leaf = entropies.clone().requires_grad_(True)
    args = types.SimpleNamespace(use_bias_correction_kl=unbiased_kl, delta=delta, steps_per_generation=1)
    trainer = types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (logp, entropy_leaf, None),
        args=args, accelerator=Accelerator(), model=types.SimpleNamespace(training=True),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level=level,
        beta=beta, loss_type=loss_type, epsilon_low=low, epsilon_high=high,
        use_vllm=tis_cap is not None, vllm_importance_sampling_correction=tis_cap is not None,
        vllm_importance_sampling_mode="token_truncate",
        current_gradient_accumulation_steps=1, max_completion_length=MAX_COMPLETION,
        _entropy_bonus_enabled=entropy > 0, use_adaptive_entropy=False, entropy_coef=entropy,
        _metrics={"train": collections.defaultdict(list)},
    )
    inputs = {
        "prompt_ids": torch.zeros(B, 1, dtype=torch.long), "prompt_mask": torch.ones(B, 1, dtype=torch.long),
        "completion_ids": torch.zeros(B, T, dtype=torch.long), "completion_mask": mask,
        "advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": ref,
        "num_items_in_batch": mask.sum(),
    }
    if tis_cap is not None:
        inputs["importance_sampling_ratio"] = torch.clamp(torch.exp(old - rollout), max=tis_cap)
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    out = {"loss": loss.item(), "grad": logp.grad.tolist()}
    if entropy > 0:
        out["grad_entropy"] = entropy_leaf.grad.tolist()
    return out


def autograd(function, start=new):
    leaf = start.clone().requires_grad_(True)
    loss = function(leaf)
    loss.backward()
    return {"loss": loss.item(), "grad": leaf.grad.tolist()}


A = advantages[:, None]


def token_mean(x):
    return (x * mask).sum() / mask.sum()


def seq_mean(x):
    return ((x * mask).sum(-1) / mask.sum(-1)).mean()


def gspo_token(logp):
    s = torch.exp(((logp - old) * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True))
    ratio = s.detach() * torch.exp(logp - logp.detach())
    return seq_mean(-torch.minimum(ratio * A, torch.clamp(ratio, 1 - 3e-2, 1 + 4e-2) * A))


def dppo(logp):
    moved = torch.exp(logp) - torch.exp(rollout)
    drop = ((A > 0) & (moved > 0.2)) | ((A < 0) & (moved < -0.2))
    log_ratio = logp - rollout
    return token_mean(-torch.where(drop, 0.0, 1.0) * A * torch.exp(log_ratio) + 1e-3 * log_ratio ** 2)


def decoupled(logp):
    ratio = torch.exp(logp - old)
    loss = torch.maximum(-A * ratio, -A * torch.clamp(ratio, 0.8, 1.2))
    behave = torch.exp(old - rollout).detach()
    return token_mean(loss * torch.where(behave <= 1.5, behave, 0.0))


old_values = torch.rand(B, T)
values = old_values + 0.4 * torch.randn(B, T)
returns = torch.rand(B, T) * 1.5


def value_clip(v):
    held = torch.clamp(v, old_values - 0.2, old_values + 0.2)
    return 0.5 * token_mean(torch.maximum((v - returns) ** 2, (held - returns) ** 2))


def kl(function):
    return lambda logp: token_mean(function(logp - ref))


numbers = torch.randn(B, T)
count = mask.sum()
mean = (numbers * mask).sum() / count
variance = (((numbers - mean) ** 2) * mask).sum() / (count - 1)
rewards = torch.tensor([0.0, 1.0, 0.25, 1.0, 0.1, 0.6])

golden = {
    "generator": {"script": "tests/golden/make_rl_trl.py", "torch": torch.__version__, "trl": trl.__version__},
    "inputs": {"mask": mask.int().tolist(), "old": old.tolist(), "new": new.tolist(), "ref": ref.tolist(),
               "rollout": rollout.tolist(), "advantages": advantages.tolist(), "entropies": entropies.tolist(),
               "values": values.tolist(), "old_values": old_values.tolist(), "returns": returns.tolist(),
               "max_completion": MAX_COMPLETION},
    "trl": {
        "ppo_clip seq_mean_token_mean": trl_case("grpo"),
        "ppo_clip token_mean": trl_case("bnpo"),
        "clip_higher token_mean": trl_case("dapo", high=0.28),
        "ppo_clip seq_mean_token_sum": trl_case("luspo"),
        "ppo_clip seq_mean_token_sum_norm": trl_case("dr_grpo"),
        "dual_clip token_mean": trl_case("bnpo", delta=1.4),
        "gspo seq_mean_token_mean": trl_case("grpo", low=3e-2, high=4e-2, level="sequence"),
        "cispo token_mean": trl_case("cispo", high=1.2),
        "tis token_mean": trl_case("bnpo", tis_cap=1.2),
        "kl_k3 token_mean": trl_case("bnpo", beta=0.3),
        "kl_k3_unbiased token_mean": trl_case("bnpo", beta=0.3, unbiased_kl=True),
        "entropy token_mean": trl_case("bnpo", entropy=0.05),
    },
    "autograd": {
        "gspo_token seq_mean_token_mean": autograd(gspo_token),
        "dppo token_mean": autograd(dppo),
        "decoupled token_mean": autograd(decoupled),
        "value_clip token_mean": autograd(value_clip, values),
        "k1 token_mean": autograd(kl(lambda d: d)),
        "k2 token_mean": autograd(kl(lambda d: d ** 2 / 2)),
        "k3 token_mean": autograd(kl(lambda d: torch.exp(-d) - 1 + d)),
    },
    "whiten": {"numbers": numbers.tolist(), "whitened": ((numbers - mean) * torch.rsqrt(variance + 1e-8) * mask).tolist()},
    "group": {"rewards": rewards.tolist(), "grpo": ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist(),
              "rloo": [(r - (rewards.sum() - r) / (len(rewards) - 1)).item() for r in rewards]},
}
print(json.dumps(golden, indent=1))
