"""The environment SDK over a real connection: a served reward is asked as a rollout server would ask it."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest

import grpc

from moerl.v1 import environment_pb2, environment_pb2_grpc, trajectory_pb2

SERVER = textwrap.dedent('''
    import sys, time
    from moerl import Environment, Step, serve

    class Length(Environment):
        def reward(self, task, prompt, completion):
            if task.answer == "slow":
                time.sleep(1.0)
            if task.answer == "crash":
                raise ZeroDivisionError("by the task")
            if task.answer == "nan":
                return float("nan")
            return 1.0 if len(completion) == int(task.answer or 0) else 0.0

    class Ask(Environment):
        def step(self, task, transcript):
            turns = sum(t.is_action for t in transcript)
            return Step(0.5, is_done=turns == 2, observation=() if turns == 2 else (9, 9))

    serve({"length": Length, "ask": Ask}[sys.argv[2]](), sys.argv[1])
''')


class ServedEnvironment(unittest.TestCase):
    def start(self, kind):
        with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as script:
            script.write(SERVER)
        self.addCleanup(os.unlink, script.name)
        port = 20000 + os.getpid() % 20000 + (kind == "ask")
        address = f"127.0.0.1:{port}"
        process = subprocess.Popen([sys.executable, script.name, address, kind], stderr=subprocess.DEVNULL,
                                   stdout=subprocess.DEVNULL, cwd="/")
        self.addCleanup(lambda: (process.kill(), process.wait()))
        channel = grpc.insecure_channel(address)
        self.addCleanup(channel.close)
        grpc.channel_ready_future(channel).result(timeout=20)
        return process, channel, environment_pb2_grpc.EnvironmentServiceStub(channel)

    def step(self, stub, answer, completion, turn_index=0, extra=()):
        transcript = [environment_pb2.Turn(token_ids=[1, 2]), environment_pb2.Turn(token_ids=completion, is_action=True), *extra]
        return stub.Step(environment_pb2.StepRequest(
            episode_id="7-0", task=trajectory_pb2.Task(name="t", payload=answer.encode()), turn_index=turn_index,
            transcript=transcript), timeout=5)

    def test_a_reward_is_what_the_method_returns(self):
        _, _, stub = self.start("length")
        self.assertEqual((1.0, True), (self.step(stub, "3", [4, 5, 6]).reward, self.step(stub, "3", [4, 5, 6]).is_done))
        self.assertEqual(0.0, self.step(stub, "2", [4, 5, 6]).reward)

    def test_an_exception_is_an_error_and_never_a_reward(self):
        _, _, stub = self.start("length")
        with self.assertRaises(grpc.RpcError) as raised:
            self.step(stub, "crash", [4])
        self.assertEqual(grpc.StatusCode.INTERNAL, raised.exception.code())
        self.assertIn("ZeroDivisionError: by the task", raised.exception.details())

    def test_not_a_number_is_passed_on_for_the_caller_to_refuse(self):
        _, _, stub = self.start("length")
        reward = self.step(stub, "nan", [4]).reward
        self.assertNotEqual(reward, reward)

    def test_a_text_prompt_without_a_tokenizer_says_what_to_do(self):
        _, _, stub = self.start("length")
        with self.assertRaises(grpc.RpcError) as raised:
            stub.Reset(environment_pb2.ResetRequest(text="hello"), timeout=5)
        self.assertIn("with_tokenizer", raised.exception.details())

    def test_several_turns_end_when_the_environment_says_so(self):
        _, _, stub = self.start("ask")
        first = self.step(stub, "", [4])
        self.assertEqual((False, [9, 9]), (first.is_done, list(first.observation_token_ids)))
        more = [environment_pb2.Turn(token_ids=[9, 9]), environment_pb2.Turn(token_ids=[5], is_action=True)]
        self.assertTrue(self.step(stub, "", [4], 1, more).is_done)

    def test_a_client_that_pings_between_calls_is_not_sent_away(self):
        process, _, _ = self.start("length")
        address = next(a for a in process.args if a.startswith("127.0.0.1:"))
        channel = grpc.insecure_channel(address, options=(
            ("grpc.keepalive_time_ms", 6_000), ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0), ("grpc.use_local_subchannel_pool", 1)))
        self.addCleanup(channel.close)
        grpc.channel_ready_future(channel).result(timeout=20)
        states = []
        channel.subscribe(states.append)
        time.sleep(27)  # the third ping that a server refuses ends the connection
        self.assertEqual({grpc.ChannelConnectivity.READY}, set(states))

    def test_a_drain_turns_not_ready_finishes_running_calls_and_exits_zero(self):
        process, channel, stub = self.start("length")
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        ready = b"\x0a\x05ready"
        self.assertEqual(b"\x08\x01", check(ready, timeout=5))
        running = stub.Step.future(environment_pb2.StepRequest(
            episode_id="1-0", task=trajectory_pb2.Task(name="t", payload=b"slow"),
            transcript=[environment_pb2.Turn(token_ids=[1]), environment_pb2.Turn(token_ids=[2], is_action=True)]), timeout=10)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        with self.assertRaises(grpc.RpcError):
            running.result()  # int("slow") raises, but only after its sleep: the call was not cut short
        self.assertEqual(grpc.StatusCode.INTERNAL, running.code())
        self.assertEqual(0, process.wait(timeout=10))


if __name__ == "__main__":
    unittest.main()
