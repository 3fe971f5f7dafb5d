"""The mismatch guard can fail: of two rollout servers one runs with a single bit of a single weight flipped, and the trainer says so,
names the first token that differs, that server, and the layer of the weight."""

import json
import os
import sys
import tempfile
import unittest

BIN = sys.argv[1]
del sys.argv[1:4]
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "frame"))

from program import Program, free_port  # noqa: E402

CONFIG = """
name: mismatch
task: {{name: reverse}}
model:
  compute: {compute}
  init: {{hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2, head_dim: 16,
          num_experts: 4, moe_intermediate_size: 32, max_position_embeddings: 64}}
trainer:
  address: 127.0.0.1:{trainer}
  run_directory: {directory}/run
  num_threads: 1
  num_steps: 3
  prompts_per_step: 8
  samples_per_prompt: 4
rollout: {{num_threads: 1, num_slots: 16, sampling: {{max_new_tokens: 8}}}}
weight_sync: {{address: "127.0.0.1:{weight_sync}", store_directory: {directory}/store}}
"""


class MismatchGuard(unittest.TestCase):
    def run_once(self, compute, failpoints):
        """Rows of metrics.jsonl, and what the trainer says about tokens that differ."""
        with tempfile.TemporaryDirectory() as directory:
            ports = {name: free_port() for name in ("trainer", "weight_sync")}
            config = CONFIG.format(directory=directory, compute=compute, **ports)

            def start(name, listen="127.0.0.1:0", **options):
                return Program(os.path.join(BIN, name), config, listen=listen, **options)

            with start("moerl-weight-sync", f"127.0.0.1:{ports['weight_sync']}"), \
                    start("moerl-trainer", f"127.0.0.1:{ports['trainer']}") as trainer, \
                    start("moerl-rollout",
                          sets=["rollout.worker=spoiled", f'server.failpoints="{failpoints}"']) as spoiled:
                if failpoints:  # the sound server comes when the spoiled one has weights, and so its share of the work
                    spoiled.wait_for("flipped a bit of a weight", timeout=60)
                with start("moerl-rollout", sets=["rollout.worker=sound"]):
                    self.assertEqual(trainer.wait(60), 0)
                differences = trainer.find("trainer and rollout disagree on a token of the current version")
            with open(f"{directory}/run/metrics.jsonl") as file:
                return [json.loads(line) for line in file], differences

    def test_shows_one_flipped_bit_and_names_token_layer_and_server(self):
        for compute, tensor, place in (
                ("fp32", "model.layers.1.self_attn.v_proj.weight", "layer 1 attention"),
                ("bf16", "model.layers.0.self_attn.o_proj.weight", "layer 0 attention"),
                ("fp32", "model.layers.0.mlp.experts.2.down_proj.weight", "layer 0 experts"),
                ("bf16", "model.layers.1.mlp.experts.1.up_proj.weight", "layer 1 experts"),
                ("fp32", "model.embed_tokens.weight", "embedding"),
                ("fp32", "model.norm.weight", "final norm"),
                ("bf16", "lm_head.weight", "head")):
            with self.subTest(tensor=tensor, compute=compute):
                rows, differences = self.run_once(compute, f"rollout.flip_weight_bit.{tensor}=error")
                self.assertGreater(max(row["max_abs_mismatch"] for row in rows), 0)
                self.assertGreater(len(differences), 0)
                for difference in differences:
                    self.assertNotEqual(difference["trainer_logprob"], difference["rollout_logprob"])
                    self.assertLess(difference["token"], 8)
                    self.assertIn("group", difference)
                    self.assertIn("sample", difference)
                    self.assertEqual(difference["first_difference"], f"{place} of spoiled")

    def test_shows_nothing_where_nothing_is_wrong(self):
        for compute in ("fp32", "bf16"):
            rows, differences = self.run_once(compute, "")
            self.assertEqual({row["max_abs_mismatch"] for row in rows}, {0})
            self.assertTrue(all(row["mismatch_tokens"] == row["trained_tokens"] for row in rows))
            self.assertEqual(differences, [])


if __name__ == "__main__":
    unittest.main()
