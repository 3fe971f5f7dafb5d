"""The Python client against a real rollout server: what its docstrings promise."""

import asyncio
import os
import sys
import tempfile
import threading
import unittest

import grpc

from moerl import AsyncRolloutClient, FinishReason, RolloutClient

BIN = sys.argv.pop(1)
for near in ("frame", "rollout"):
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "integration", near))

import tiny_model  # noqa: E402
from program import Program, wait_until  # noqa: E402

CONFIG = """
name: client
task: {{name: reverse}}
model: {{path: {model}, compute: fp32}}
rollout: {{pull_leases: false, num_slots: 16, num_threads: 1, kv_cache_bytes: 33554432}}
"""
SAMPLING = {"num_samples": 2, "max_new_tokens": 12, "seed": 7}


class Client(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.files = tempfile.TemporaryDirectory()
        cls.model = tiny_model.write(os.path.join(cls.files.name, "model"))

    @classmethod
    def tearDownClass(cls):
        cls.files.cleanup()

    def setUp(self):
        self.program = Program(os.path.join(BIN, "moerl-rollout"), CONFIG.format(model=self.model))
        self.addCleanup(self.program.__exit__)
        self.client = RolloutClient(self.program.address)
        self.addCleanup(self.client.close)
        self.assertTrue(wait_until(self.answers))

    def answers(self):
        try:
            return len(self.client.generate([2], max_new_tokens=1)) == 1
        except grpc.RpcError:
            return False

    def asynchronously(self, ask):
        async def run():
            async with AsyncRolloutClient(self.program.address) as client:
                return await ask(client)

        return asyncio.run(run())

    def test_generates_every_sample_whole_in_order_and_again_with_its_seed(self):
        completions = self.client.generate([2, 3, 4], with_prompt_logprobs=True, **SAMPLING)
        self.assertEqual([0, 1], [completion.sample_index for completion in completions])
        for completion in completions:
            self.assertEqual(FinishReason.LENGTH, completion.finish_reason)
            self.assertEqual([12, 12, 12], [len(completion.token_ids), len(completion.logprobs), len(completion.versions)])
            self.assertIsNone(completion.text)
        self.assertEqual(2, len(completions[0].prompt_logprobs))
        again = self.client.generate([2, 3, 4], with_prompt_logprobs=True, **SAMPLING)
        self.assertEqual(completions, again)

    def test_streams_the_tokens_that_it_generates(self):
        tokens = {0: [], 1: []}
        for chunk in self.client.stream([2, 3, 4], **SAMPLING):
            tokens[chunk.sample_index] += chunk.token_ids
        completions = self.client.generate([2, 3, 4], **SAMPLING)
        self.assertEqual([completion.token_ids for completion in completions], [tokens[0], tokens[1]])

    def test_the_asynchronous_client_has_the_same_calls(self):
        async def ask(client):
            chunks = [chunk async for chunk in client.stream([2, 3, 4], **SAMPLING)]
            return await client.generate([2, 3, 4], **SAMPLING), chunks, await client.model_info(), await client.load()

        completions, chunks, info, load = self.asynchronously(ask)
        self.assertEqual(self.client.generate([2, 3, 4], **SAMPLING), completions)
        self.assertEqual(24, sum(len(chunk.token_ids) for chunk in chunks))
        self.assertEqual((40, 40), (info.vocab_size, self.client.model_info().vocab_size))
        self.assertEqual((0, 0), (load.num_running, self.client.load().num_running))

    def test_aborts_a_call_by_its_name(self):
        async def abort(client):
            return await client.abort("long")

        for ask in (lambda: self.client.abort("long"), lambda: self.asynchronously(abort)):
            found = []
            call = threading.Thread(target=lambda: found.extend(
                self.client.generate([2], request_id="long", max_new_tokens=4000)))
            call.start()
            self.assertTrue(wait_until(lambda: self.client.load().num_running == 1))
            self.assertEqual(1, ask())
            call.join(10)
            self.assertEqual([FinishReason.ABORT], [completion.finish_reason for completion in found])

    def test_says_what_is_wrong(self):
        with self.assertRaises(grpc.RpcError) as raised:
            self.client.generate([2, 99])
        self.assertEqual(grpc.StatusCode.INVALID_ARGUMENT, raised.exception.code())
        with self.assertRaisesRegex(ValueError, "needs a tokenizer"):
            self.client.generate("text")

    def test_a_drain_turns_new_calls_away(self):
        async def drain(client):
            return await client.drain()

        self.assertEqual((0, 0), (self.client.drain(), self.asynchronously(drain)))
        with self.assertRaises(grpc.RpcError) as raised:
            self.client.generate([2], max_new_tokens=1)
        self.assertEqual(grpc.StatusCode.UNAVAILABLE, raised.exception.code())


if __name__ == "__main__":
    unittest.main()
