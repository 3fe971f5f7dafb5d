"""Generates, aborts, watches a drain and reads metrics with nothing but the protos and Debian's grpcio."""

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import urllib.request

BIN, PROTO, PROTOC = sys.argv[1:4]
del sys.argv[1:4]
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "frame"))

import grpc  # noqa: E402

import tiny_model  # noqa: E402
from program import Program, wait_until  # noqa: E402
from wire import NOT_SERVING, SERVING, check_health, error_details, watch_health  # noqa: E402

CONFIG = """
name: generate
task: {{name: reverse}}
model: {{path: {model}, compute: fp32}}
rollout: {{pull_leases: false, num_slots: 16, num_threads: 1, kv_cache_bytes: 33554432}}
"""


def compile_protos(directory):
    files = ["moerl/v1/field_rules.proto", "moerl/v1/trajectory.proto", "moerl/v1/rollout.proto"]
    subprocess.run([PROTOC, "-I", PROTO, f"--python_out={directory}", *files], check=True)
    sys.path.insert(0, directory)
    return importlib.import_module("moerl.v1.rollout_pb2")


class Rollout:
    """The five methods of RolloutService over a channel."""

    def __init__(self, channel, pb):
        def method(kind, name, request, response):
            return getattr(channel, kind)(f"/moerl.v1.RolloutService/{name}", request.SerializeToString, response.FromString)

        self.generate = method("unary_stream", "Generate", pb.GenerateRequest, pb.GenerateResponse)
        self.abort = method("unary_unary", "Abort", pb.AbortRequest, pb.AbortResponse)
        self.drain = method("unary_unary", "Drain", pb.DrainRequest, pb.DrainResponse)
        self.get_load = method("unary_unary", "GetLoad", pb.GetLoadRequest, pb.GetLoadResponse)
        self.get_model_info = method("unary_unary", "GetModelInfo", pb.GetModelInfoRequest, pb.GetModelInfoResponse)


class Generate(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.files = tempfile.TemporaryDirectory()
        cls.pb = compile_protos(cls.files.name)
        model = tiny_model.write(os.path.join(cls.files.name, "model"))
        cls.config = CONFIG.format(model=model)

    @classmethod
    def tearDownClass(cls):
        cls.files.cleanup()

    def setUp(self):
        self.program = Program(os.path.join(BIN, "moerl-rollout"), self.config)
        self.channel = grpc.insecure_channel(self.program.address)
        self.rollout = Rollout(self.channel, self.pb)
        self.assertTrue(wait_until(lambda: check_health(self.channel, "ready") == SERVING))

    def tearDown(self):
        self.channel.close()
        self.program.__exit__()

    def request(self, **fields):
        request = self.pb.GenerateRequest(prompt_token_ids=[2, 3, 4], num_samples=2, seed=7)
        request.sampling.max_new_tokens = 12
        for name, value in fields.items():
            target = request
            *path, last = name.split("__")
            for part in path:
                target = getattr(target, part)
            if isinstance(value, list):
                del getattr(target, last)[:]
                getattr(target, last).extend(value)
            else:
                setattr(target, last, value)
        return request

    def collect(self, request, timeout=30):
        tokens, completes = {}, {}
        for response in self.rollout.generate(request, timeout=timeout):
            if response.HasField("chunk"):
                tokens.setdefault(response.sample_index, []).extend(response.chunk.tokens.token_ids)
            else:
                completes[response.sample_index] = response.complete
        return tokens, completes

    def test_generates(self):
        tokens, completes = self.collect(self.request())
        self.assertEqual(sorted(tokens), [0, 1])
        for index, complete in completes.items():
            self.assertEqual(len(tokens[index]), 12)
            self.assertEqual(complete.num_tokens, 12)
            self.assertEqual(complete.finish_reason, 2)  # length
        self.assertEqual(self.collect(self.request())[0], tokens)
        self.assertNotEqual(self.collect(self.request(seed=8))[0], tokens)

    def test_the_command_line_gets_the_same_here_and_there(self):
        def lines(*where):
            done = subprocess.run(
                [os.path.join(BIN, "moerl"), "generate", *where, "--tokens", "2,3,4", "--n", "3", "--seed", "7", "--top-k", "5",
                 "--max-new-tokens", "9", "--stop", "1"], capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 0, done.stderr)
            return done.stdout

        here = lines("--model", os.path.join(self.files.name, "model"), "--compute", "fp32")
        self.assertEqual(here.count("\n"), 3)
        self.assertEqual(lines("--address", self.program.address), here)

    def command_line(self, *arguments):
        return subprocess.run([os.path.join(BIN, "moerl"), "generate", *arguments], capture_output=True, text=True, check=False)

    def test_the_command_line_asks_for_what_fits_the_context(self):
        context = tiny_model.CONFIG["max_position_embeddings"]
        num_prompt, room = context - 20, 20
        prompt = ",".join(["2"] * num_prompt)
        for where in (["--model", os.path.join(self.files.name, "model")], ["--address", self.program.address]):
            with self.subTest(where):
                done = self.command_line(*where, "--tokens", prompt)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual(len(json.loads(done.stdout)["tokens"]), room)
                done = self.command_line(*where, "--tokens", prompt, "--max-new-tokens", "21")
                self.assertEqual((done.returncode, done.stdout), (1, ""))
                self.assertEqual(done.stderr, f"--max-new-tokens: expected 1 to {room}, what a prompt of {num_prompt} leaves of the "
                                              f"model's context of {context}, found 21\n")
                done = self.command_line(*where, "--tokens", f"{prompt},{prompt}")
                self.assertIn(f"--tokens: expected at most {context - 1} ids", done.stderr)

    def test_the_command_line_names_a_server_that_is_no_rollout(self):
        for binary, name in (("moerl-weight-sync", "weight_sync"), ("moerl-environment", "an environment")):
            with self.subTest(binary), Program(os.path.join(BIN, binary)) as other:
                done = self.command_line("--address", other.address, "--tokens", "2")
                self.assertEqual(done.returncode, 1)
                self.assertEqual(done.stderr, f"generate: expected a rollout server at {other.address}, found {name}; the "
                                              "addresses of a run are in its endpoints.json\n")

    def test_names_the_field_of_a_bad_request(self):
        bad = [
            (dict(prompt_token_ids=[]), "prompt_token_ids"),
            (dict(prompt_token_ids=[2, 40]), "prompt_token_ids[1]"),
            (dict(num_samples=0), "num_samples"),
            (dict(sampling__temperature=-1), "sampling.temperature"),
            (dict(sampling__max_new_tokens=10_000_000), "sampling.max_new_tokens"),
            (dict(sampling__stop_token_ids=[40]), "sampling.stop_token_ids[0]"),
        ]
        for fields, expected in bad:
            with self.subTest(expected), self.assertRaises(grpc.RpcError) as caught:
                self.collect(self.request(**fields))
            self.assertEqual(caught.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
            (kind, violations), = error_details(caught.exception)
            self.assertEqual(kind, "google.rpc.BadRequest")
            self.assertIn(expected.encode(), violations[0][1])

    def test_tells_its_model_and_load(self):
        info = self.rollout.get_model_info(self.pb.GetModelInfoRequest(), timeout=5)
        self.assertEqual((info.architecture, info.vocab_size), ("Qwen3MoeForCausalLM", 40))
        load = self.rollout.get_load(self.pb.GetLoadRequest(), timeout=5)
        self.assertGreater(load.kv_pages_total, 0)
        self.assertEqual(load.num_running, 0)

    def test_drains_on_sigterm_and_finishes_what_runs(self):
        statuses, answer = [], {}
        watcher = threading.Thread(target=lambda: self.watch(statuses))
        watcher.start()
        caller = threading.Thread(
            target=lambda: answer.update(tokens=self.collect(self.request(sampling__max_new_tokens=3000))[0]))
        caller.start()
        self.assertTrue(wait_until(lambda: self.rollout.get_load(self.pb.GetLoadRequest()).num_running == 2))
        self.program.terminate()
        self.assertTrue(wait_until(lambda: NOT_SERVING in statuses))
        self.program.process.send_signal(signal.SIGSTOP)  # being stopped a while does not cut the drain short
        self.program.process.send_signal(signal.SIGCONT)
        with self.assertRaises(grpc.RpcError) as caught:
            self.collect(self.request())
        self.assertEqual(caught.exception.code(), grpc.StatusCode.UNAVAILABLE)
        self.assertEqual(error_details(caught.exception)[0][0], "google.rpc.RetryInfo")
        caller.join(30)
        self.assertEqual(self.program.wait(), 0)
        watcher.join()
        self.assertEqual([len(tokens) for tokens in answer["tokens"].values()], [3000, 3000])
        self.assertEqual(statuses, [SERVING, NOT_SERVING])

    def watch(self, statuses):
        try:
            for status in watch_health(self.channel, "ready"):
                statuses.append(status)
        except grpc.RpcError:
            pass

    def test_ends_at_once_on_a_second_sigterm(self):
        call = self.rollout.generate(self.request(sampling__max_new_tokens=4000, num_samples=16), timeout=60)
        next(call)
        self.program.terminate()
        self.program.wait_for("draining")
        self.program.terminate()
        self.assertEqual(self.program.wait(), 128 + 15)  # the end of a drain gives 0 or 1

    def test_counts_under_vllms_names(self):
        self.collect(self.request())
        page = lambda: urllib.request.urlopen(f"http://{self.program.metrics_address}/metrics").read().decode()  # noqa: E731
        self.assertTrue(wait_until(lambda: "\nmoerl_rollout_generation_tokens_total 24" in page()))
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total", "num_preemptions_total"):
            self.assertIn(f"\nmoerl_rollout_{name} ", page())
        # Two samples of twelve tokens: what is counted once a sample, and between two tokens.
        for name, count in (("request_queue_time_seconds_count", 2), ("time_to_first_token_seconds_count", 2), ("inter_token_latency_seconds_count", 22),
                            ("e2e_request_latency_seconds_count", 2), ('request_success_total{finished_reason="length"}', 2),
                            ('request_success_total{finished_reason="abort"}', 0)):
            self.assertIn(f"\nmoerl_rollout_{name} {count}\n", page())
        checked = subprocess.run(["promtool", "check", "metrics"], input=page().encode(), capture_output=True)
        self.assertEqual(checked.returncode, 0, checked.stdout + checked.stderr)

    def test_sleeps_when_idle(self):
        self.collect(self.request())
        before = self.program.cpu_seconds()
        time.sleep(3)
        self.assertLess(self.program.cpu_seconds() - before, 0.035)


if __name__ == "__main__":
    unittest.main()
