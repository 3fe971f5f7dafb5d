"""Checkpoints of a real run: asked for, not written twice, damaged on one rank only, and asked for when all is done."""

import glob
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import grpc

BIN = os.path.abspath(sys.argv.pop(1))
CONFIG = """
name: reverse
model:
  compute: fp32
  init: {hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 2, num_experts: 4,
         moe_intermediate_size: 32, max_position_embeddings: 64}
task: {name: reverse}
algorithm: {kl_coefficient: 0.01}
trainer: {num_ranks: 2, num_threads: 1, num_steps: 100000, prompts_per_step: 4, samples_per_prompt: 2,
          checkpoint_every_steps: 3}
rollout: {num_servers: 1, num_threads: 1, sampling: {max_new_tokens: 10}}
server: {drain_grace_ms: 5000}
"""


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


class Checkpoints(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="moerl_checkpoint_test.")
        self.addCleanup(directory.cleanup)
        self.directory = directory.name
        with open(os.path.join(self.directory, "config.yaml"), "w") as config:
            config.write(CONFIG)

    def start(self, *arguments):
        output = open(os.path.join(self.directory, "output.txt"), "w")
        self.addCleanup(output.close)
        self.process = subprocess.Popen([os.path.join(BIN, "moerl"), "run", "config.yaml", *arguments],
                                        cwd=self.directory, stdout=output, stderr=output)
        self.addCleanup(lambda process: (process.kill(), process.wait()), self.process)

    def said(self, name="output.txt"):
        path = os.path.join(self.directory, name)
        if not os.path.exists(path):
            return ""
        with open(path) as file:
            return file.read()

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        self.process.wait(30)

    def checkpoints(self):
        return sorted(glob.glob(os.path.join(self.directory, "runs/reverse/checkpoints/step_*[0-9]")))

    def call(self, method, seconds=30):
        """The answer's bytes to a request without fields."""
        with open(os.path.join(self.directory, "runs/reverse/endpoints.json")) as file:
            address = json.load(file)["trainer-0"]["address"]
        with grpc.insecure_channel(address) as channel:
            return channel.unary_unary("/moerl.v1.TrainerService/" + method)(b"", timeout=seconds, wait_for_ready=True)

    def save(self):
        """The directory that SaveCheckpoint names, the last field of its answer."""
        return re.search(rb"/[\w/.-]*/step_\d+_epoch_\d+", self.call("SaveCheckpoint")).group().decode()

    def test_one_asked_for_twice_is_written_once(self):
        self.start("--set", "trainer.checkpoint_every_steps=100000")
        self.assertTrue(wait_until(lambda: "step 2/" in self.said()), self.said())
        self.call("Pause")
        first = self.save()
        identity = os.stat(first).st_ino
        self.assertTrue(wait_until(lambda: self.save() == first, 5))
        self.assertEqual(identity, os.stat(first).st_ino)
        self.stop()
        self.assertEqual(identity, os.stat(first).st_ino)
        self.assertEqual(first, self.checkpoints()[-1])

    def test_a_finished_run_names_its_last_one(self):
        self.start("--set", "trainer.num_steps=2", "--set", "trainer.exit_when_done=false")
        self.assertTrue(wait_until(lambda: "run is done" in self.said("runs/reverse/logs/trainer-0.log")), self.said())
        self.assertEqual(self.checkpoints()[-1], self.save())

    def test_damage_on_one_rank_takes_all_to_the_one_before(self):
        self.start()
        self.assertTrue(wait_until(lambda: "step 7/" in self.said()), self.said())
        self.stop()
        before, newest = (int(re.search(r"step_(\d+)", path).group(1)) for path in self.checkpoints()[-2:])
        with open(os.path.join(self.checkpoints()[-1], "policy_0001.safetensors"), "r+b") as file:
            file.truncate(100)
        self.start("--resume")
        self.assertTrue(wait_until(lambda: f"step {newest + 1}/" in self.said()), self.said())
        log = [json.loads(line) for line in self.said("runs/reverse/logs/trainer-0.log").splitlines()]
        damaged = [line for line in log if line["message"].startswith("a checkpoint cannot be read")]
        self.assertEqual([newest], [line["step"] for line in damaged])
        self.assertIn("rank 1: ", damaged[0]["why"])
        self.assertEqual([before], [line["step"] for line in log if line["message"] == "run resumes"])
        self.assertFalse([line for line in log if line["message"] == "the trainer ends"])


if __name__ == "__main__":
    unittest.main()
