"""A model directory, prompts that are text and a reward in Python: the environment encodes the prompts for trainer and `moerl eval`
alike, and judges what was sampled from those tokens."""

import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest

import grpc

BIN = os.path.abspath(sys.argv.pop(1))
# A prompt of letters becomes their places in the alphabet; a completion is worth a half, more if its prompt came back intact.
REWARD = textwrap.dedent("""
    import sys
    from moerl import Environment, Step, serve

    class Letters(Environment):
        def prompt(self, task, text):
            return [ord(letter) - ord("a") for letter in text]

        def step(self, task, transcript):
            text = "".join(chr(ord("a") + id) for id in transcript[0].token_ids)
            return Step(0.5 + 0.5 * (text == task.answer))

    serve(Letters(), sys.argv[1])
""")
CONFIG = """
name: text
model: {{path: model, compute: bf16}}
task: {{name: letters, prompt_file: prompts.jsonl, held_out_file: prompts.jsonl}}
environment: {{address: "{address}", timeout_ms: 20000}}
trainer: {{num_threads: 1, num_steps: 1, prompts_per_step: 3, samples_per_prompt: 2}}
rollout: {{num_threads: 1, kv_cache_bytes: 1048576, sampling: {{max_new_tokens: 4}}}}
"""
MODEL = {"model_type": "mixtral", "vocab_size": 30, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
         "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
         "tie_word_embeddings": True, "eos_token_id": 29}


class TextPrompts(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="moerl_text_test.")
        self.addCleanup(directory.cleanup)
        self.directory = directory.name
        address = f"127.0.0.1:{18000 + os.getpid() % 2000}"
        self.write("reward.py", REWARD)
        self.write("config.yaml", CONFIG.format(address=address))
        self.write("config.json", json.dumps(MODEL))
        # Every other answer is not its prompt's text.
        rows = [{"text": text, "answer": text if i % 2 else "other"} for i, text in enumerate(("abc", "hello", "xy", "moe"))]
        self.write("prompts.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        self.moerl("init", "--config", "config.json", "--out", "model")
        server = subprocess.Popen([sys.executable, "reward.py", address], cwd=self.directory, stdout=subprocess.DEVNULL)
        self.addCleanup(lambda: (server.kill(), server.wait()))
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(timeout=30)

    def write(self, name, text):
        with open(os.path.join(self.directory, name), "w") as file:
            file.write(text)

    def moerl(self, *arguments):
        done = subprocess.run([os.path.join(BIN, "moerl"), *arguments], cwd=self.directory, capture_output=True, text=True,
                              timeout=120)
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
        return done.stdout

    def test_trainer_and_evaluation_learn_the_tokens_from_the_environment(self):
        result = json.loads(self.moerl("eval", "config.yaml", "--model", "model", "--num-prompts", "4", "--greedy", "--json"))
        self.assertEqual((4, 0, 0.75, 0.5), tuple(result[key] for key in ("num_prompts", "num_failed", "reward_mean", "pass_rate")))
        self.assertAlmostEqual(0.125, result["reward_standard_error"])  # sqrt(1/16 / 4)

        self.write("model/tokenizer.json", '{"version": "1.0"}')
        self.write("model/chat_template.jinja", "{{ messages }}")
        self.write("model/notes.txt", "of no use to a model made from this one")
        self.moerl("run", "config.yaml")
        with open(os.path.join(self.directory, "runs/text/metrics.jsonl")) as rows:
            step = json.loads(rows.readline())
        self.assertEqual((1, 0, 0), (step["step"], step["max_abs_mismatch"], step["num_groups_dropped"]))
        self.assertGreaterEqual(step["reward_mean"], 0.5)
        self.moerl("eval", "config.yaml", "--model", "runs/text/model", "--num-prompts", "4")
        self.assertEqual(["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"],
                         sorted(os.listdir(os.path.join(self.directory, "runs/text/model"))))


if __name__ == "__main__":
    unittest.main()
