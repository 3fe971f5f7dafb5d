"""A reward served from Python that hangs, raises, answers NaN, a number outside the range and a token outside the vocabulary: each drops
its group with a reason, and the run goes on to its end. Between two steps it is also gone for a while, which drops nothing."""

import concurrent.futures
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import unittest

BIN, PROTO, PROTOC = sys.argv[1:4]
del sys.argv[1:4]
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "frame"))

import grpc  # noqa: E402

from program import Program, free_port, wait_until  # noqa: E402

NUM_STEPS = 4
CONFIG = """
name: environment
task: {{name: reverse}}
model:
  compute: fp32
  init: {{hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 2, head_dim: 16,
          num_experts: 4, moe_intermediate_size: 32, max_position_embeddings: 64}}
trainer:
  address: 127.0.0.1:{trainer}
  run_directory: {directory}/run
  num_threads: 1
  num_steps: {num_steps}
  prompts_per_step: 8
  samples_per_prompt: 2
  learning_rate: 0.0001
rollout: {{address: "127.0.0.1:{rollout}", num_threads: 1, num_slots: 64, sampling: {{max_new_tokens: 6}}}}
weight_sync: {{address: "127.0.0.1:{weight_sync}", store_directory: {directory}/store}}
environment: {{address: "127.0.0.1:{environment}", timeout_ms: 400, reward_min: 0, reward_max: 1, calls_max: 16}}
"""


def compile_protos(directory):
    files = [f"moerl/v1/{name}.proto" for name in ("field_rules", "trajectory", "environment")]
    subprocess.run([PROTOC, "-I", PROTO, f"--python_out={directory}", *files], check=True)
    sys.path.insert(0, directory)
    return importlib.import_module("moerl.v1.environment_pb2")


class Judge:
    """EnvironmentService whose answer depends on the prompt's first letter."""

    def __init__(self, pb, port):
        self.pb, self.port = pb, port
        self.asked = {}
        self.start()

    def start(self):
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(16))
        step = grpc.unary_unary_rpc_method_handler(self.step, self.pb.StepRequest.FromString, lambda r: r.SerializeToString())
        handler = grpc.method_handlers_generic_handler("moerl.v1.EnvironmentService", {"Step": step})
        self.server.add_generic_rpc_handlers((handler,))
        assert self.server.add_insecure_port(f"127.0.0.1:{self.port}") == self.port
        self.server.start()

    def stop(self):
        self.server.stop(0).wait()

    def step(self, request, context):
        prompt = request.transcript[0].token_ids
        kind = ("hangs", "raises", "nan", "too_much", "bad_token", "fair", "fair", "fair")[sum(prompt) % 8]
        self.asked[kind] = self.asked.get(kind, 0) + 1
        if kind == "hangs":
            time.sleep(1)
        if kind == "raises":
            raise RuntimeError("the reward is broken")
        if kind == "nan":
            return self.pb.StepResponse(reward=float("nan"), is_done=True)
        if kind == "too_much":
            return self.pb.StepResponse(reward=7, is_done=True)
        if kind == "bad_token":
            return self.pb.StepResponse(observation_token_ids=[10_000], is_done=False)
        answer = request.transcript[-1].token_ids
        return self.pb.StepResponse(reward=(sum(answer) % 5) / 4, is_done=True)


class FaultyReward(unittest.TestCase):
    def test_drops_what_it_cannot_judge_and_goes_on(self):
        with tempfile.TemporaryDirectory() as directory:
            pb = compile_protos(directory)
            ports = {name: free_port() for name in ("trainer", "rollout", "weight_sync", "environment")}
            config = CONFIG.format(directory=directory, num_steps=NUM_STEPS, **ports)
            judge = Judge(pb, ports["environment"])

            def start(name, member):
                return Program(os.path.join(BIN, name), config, listen=f"127.0.0.1:{ports[member]}")

            with start("moerl-weight-sync", "weight_sync"), start("moerl-trainer", "trainer") as trainer, \
                    start("moerl-rollout", "rollout") as rollout:
                trainer.wait_for("step", step=1, timeout=60)
                judge.stop()
                time.sleep(1)
                judge.start()
                self.assertEqual(trainer.wait(60), 0)
                failures = [event["reason"] for event in rollout.find("sample failed")]
                outages = rollout.find("environment unavailable, asking again")
            judge.stop()
            with open(f"{directory}/run/metrics.jsonl") as file:
                rows = [json.loads(line) for line in file]
        self.assertEqual([row["step"] for row in rows], list(range(1, NUM_STEPS + 1)))
        self.assertEqual({row["max_abs_mismatch"] for row in rows}, {0})
        self.assertGreater(int(rows[-1]["num_groups_dropped"]), 0)
        for row in rows:
            self.assertTrue(0 <= row["reward_mean"] <= 1)
        faults = {"hangs": "Deadline", "raises": "the reward is broken", "nan": "reward nan", "too_much": "reward 7", "bad_token": "10000"}
        for kind, reason in faults.items():
            self.assertIn(kind, judge.asked, "the prompts exercise every fault")
            self.assertTrue(any(reason in failure for failure in failures), kind)
        self.assertGreater(len(outages), 0)
        for failure in failures:  # the outage is none of them
            self.assertTrue(any(reason in failure for reason in faults.values()), failure)
        print(f"asked: {judge.asked}; outages noticed: {len(outages)}", file=sys.stderr)


if __name__ == "__main__":
    unittest.main()
