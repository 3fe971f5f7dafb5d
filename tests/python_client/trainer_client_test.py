"""The Python clients of the trainer, synchronous and asynchronous, against a real run: what their docstrings promise."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from moerl import AsyncTrainerClient, TrainerClient
from moerl.v1 import trainer_pb2

BIN = os.path.abspath(sys.argv.pop(1))
CONFIG = """
name: watched
model:
  compute: fp32
  init: {hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 2, num_experts: 4,
         moe_intermediate_size: 32, max_position_embeddings: 64}
task: {name: reverse}
trainer: {num_threads: 1, num_steps: 100000, prompts_per_step: 2, samples_per_prompt: 2}
rollout: {num_threads: 1, sampling: {max_new_tokens: 10}}
server: {drain_grace_ms: 5000}
"""
SECONDS_MAX = 60


def first(rows, count):
    return [next(rows) for _ in range(count)]


class Trainer(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="moerl_trainer_client_test.")
        self.addCleanup(directory.cleanup)
        with open(os.path.join(directory.name, "config.yaml"), "w") as file:
            file.write(CONFIG)
        self.run_directory = os.path.join(directory.name, "runs/watched")
        run = subprocess.Popen([os.path.join(BIN, "moerl"), "run", "config.yaml"], cwd=directory.name, stdout=subprocess.DEVNULL)
        self.addCleanup(lambda: (run.send_signal(signal.SIGINT), run.wait()))
        self.assertTrue(self.wait_until(lambda: len(self.rows()) >= 2))
        with open(os.path.join(self.run_directory, "endpoints.json")) as file:
            self.address = json.load(file)["trainer"]["address"]

    def wait_until(self, condition):
        deadline = time.monotonic() + SECONDS_MAX
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def rows(self):
        try:
            with open(os.path.join(self.run_directory, "metrics.jsonl")) as file:
                return [json.loads(line) for line in file if line.endswith("\n")]
        except OSError:
            return []

    def test_both_give_the_rows_of_the_metrics_file_and_those_that_follow(self):
        async def watch(after_step, count):
            async with AsyncTrainerClient(self.address) as client:
                rows = client.watch_metrics(after_step)
                found = [await anext(rows) for _ in range(count)]
                await rows.aclose()
                return found

        with TrainerClient(self.address) as client:
            there = len(self.rows())
            rows = first(client.watch_metrics(), there + 2)  # two of them of steps to come
        self.assertEqual(list(range(1, there + 3)), [row.step for row in rows])
        for row, line in zip(rows, self.rows()):
            self.assertEqual((line["step"], line["reward_mean"], line["trained_tokens"]),
                             (row.step, row.reward_mean, row.trained_tokens))
        self.assertEqual(rows, asyncio.run(watch(0, there + 2)))
        self.assertEqual(rows[1:], asyncio.run(watch(1, there + 1)))

    def test_both_pause_checkpoint_resume_and_tell_of_it(self):
        async def pause_and_checkpoint():
            async with AsyncTrainerClient(self.address) as client:
                await client.pause()
                deadline = time.monotonic() + SECONDS_MAX
                while (status := await client.status()).phase != trainer_pb2.TRAINER_PHASE_PAUSED:
                    self.assertLess(time.monotonic(), deadline)
                    await asyncio.sleep(0.05)
                return status, await client.save_checkpoint(SECONDS_MAX)

        async def resume():
            async with AsyncTrainerClient(self.address) as client:
                await client.resume()

        paused, checkpoint = asyncio.run(pause_and_checkpoint())
        self.assertEqual((1, 100000), (paused.num_ranks, paused.num_steps))
        self.assertEqual(paused.step, checkpoint.step)
        with TrainerClient(self.address) as client:
            self.assertEqual(checkpoint.step, client.status().checkpoint_step)
            asyncio.run(resume())
            self.assertTrue(self.wait_until(lambda: client.status().step > paused.step))
            client.pause()
            self.assertTrue(self.wait_until(lambda: client.status().phase == trainer_pb2.TRAINER_PHASE_PAUSED))
            stopped = client.status().step
            self.assertEqual(stopped, client.save_checkpoint(SECONDS_MAX).step)
            client.resume()
            self.assertTrue(self.wait_until(lambda: client.status().step > stopped))


if __name__ == "__main__":
    unittest.main()
