"""The mismatch guard can fail: of two rollout servers one runs with a single bit of a single weight flipped, and the trainer says so
and names the first token that differs."""

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
                    start("moerl-rollout", sets=["rollout.worker=sound"]), \
                    start("moerl-rollout", sets=["rollout.worker=spoiled"], failpoints=failpoints) as spoiled:
                self.assertEqual(trainer.wait(60), 0)
                self.assertEqual(bool(spoiled.find("flipped a bit of a weight")), bool(failpoints))
                differences = trainer.find("trainer and rollout disagree on a token of the current version")
            with open(f"{directory}/run/metrics.jsonl") as file:
                return [json.loads(line) for line in file], differences

    def test_shows_one_flipped_bit_and_names_the_token(self):
        for compute in ("fp32", "bf16"):
            rows, differences = self.run_once(compute, "rollout.flip_weight_bit=error")
            self.assertGreater(max(row["max_abs_mismatch"] for row in rows), 0)
            for difference in differences:
                self.assertNotEqual(difference["trainer_logprob"], difference["rollout_logprob"])
                self.assertLess(difference["token"], 8)
                self.assertIn("group", difference)
                self.assertIn("sample", difference)
            self.assertGreater(len(differences), 0)

    def test_shows_nothing_where_nothing_is_wrong(self):
        for compute in ("fp32", "bf16"):
            rows, differences = self.run_once(compute, "")
            self.assertEqual({row["max_abs_mismatch"] for row in rows}, {0})
            self.assertTrue(all(row["mismatch_tokens"] == row["trained_tokens"] for row in rows))
            self.assertEqual(differences, [])


if __name__ == "__main__":
    unittest.main()
