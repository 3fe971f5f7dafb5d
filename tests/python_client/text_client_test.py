"""Text through a tokenizer: what the library of the format encodes and decodes is what the client sends and gives back."""

import asyncio
import json
import os
import sys
import tempfile
import unittest

import grpc
import tokenizers

from moerl import AsyncRolloutClient, FinishReason, RolloutClient, Tokenizer

BIN = sys.argv.pop(1)
TESTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
for near in ("frame", "rollout"):
    sys.path.insert(0, os.path.join(TESTS, "integration", near))

import tiny_model  # noqa: E402
from program import Program, wait_until  # noqa: E402

CONFIG = """
name: text
task: {{name: text}}
model: {{path: {model}, compute: fp32}}
environment: {{address: "127.0.0.1:9"}}
rollout: {{pull_leases: false, num_slots: 16, num_threads: 1, kv_cache_bytes: 33554432}}
"""
PROMPT = "caf\u00e9 <think>Natalia sold 24 clips"


class Text(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with open(os.path.join(TESTS, "golden/byte_level_tokenizer.json")) as file:
            cls.golden = json.load(file)
        cls.files = tempfile.TemporaryDirectory(prefix="moerl_text_client_test.")
        tiny_model.CONFIG["vocab_size"] = 400  # that of the tokenizer; those it lacks decode to nothing
        cls.model = tiny_model.write(os.path.join(cls.files.name, "model"))
        with open(os.path.join(cls.model, "tokenizer.json"), "w") as file:
            json.dump(cls.golden["tokenizer"], file)
        cls.library = tokenizers.Tokenizer.from_str(json.dumps(cls.golden["tokenizer"]))

    @classmethod
    def tearDownClass(cls):
        cls.files.cleanup()

    def test_a_tokenizer_is_a_file_or_the_directory_that_holds_it(self):
        for path in (self.model, os.path.join(self.model, "tokenizer.json")):
            tokenizer = Tokenizer(path)
            for case in self.golden["cases"]:
                self.assertEqual(case["text"], tokenizer.decode(case["ids"]))
            self.assertEqual(self.golden["cases"][0]["ids"], tokenizer.encode(self.golden["cases"][0]["text"]))
        with self.assertRaisesRegex(FileNotFoundError, "no tokenizer.json at .*nowhere"):
            Tokenizer(os.path.join(self.model, "nowhere"))

    def test_generates_text_from_text(self):
        with Program(os.path.join(BIN, "moerl-rollout"), CONFIG.format(model=self.model)) as program:
            tokenizer = Tokenizer(self.model)
            ids = self.library.encode(PROMPT).ids
            with RolloutClient(program.address, tokenizer=tokenizer) as client:
                self.assertTrue(wait_until(lambda: self.answers(client)))
                told = {"num_samples": 2, "max_new_tokens": 24, "seed": 3}
                completions = client.generate(PROMPT, with_prompt_logprobs=True, **told)
                self.assertEqual(len(ids) - 1, len(completions[0].prompt_logprobs))
                for completion in completions:
                    self.assertEqual(24, len(completion.token_ids))
                    self.assertEqual(self.library.decode(completion.token_ids, skip_special_tokens=True), completion.text)
                    self.assertNotEqual("", completion.text)
                # Ids in place of the text are the same prompt, and a text to stop at is its tokens.
                self.assertEqual(completions, client.generate(ids, with_prompt_logprobs=True, **told))
                end = self.piece(completions[0].token_ids)
                stopped = client.generate(PROMPT, stop_sequences=[end], **told)[0]
                self.assertEqual(FinishReason.STOP, stopped.finish_reason)
                self.assertLess(len(stopped.token_ids), 24)

            async def ask():
                async with AsyncRolloutClient(program.address, tokenizer=tokenizer) as client:
                    return await client.generate(PROMPT, with_prompt_logprobs=True, **told)

            self.assertEqual(completions, asyncio.run(ask()))

    def piece(self, token_ids):
        """Text of the first token of the completion that reads as one token again."""
        for token in token_ids[:-1]:
            text = self.library.decode([token])
            if text and self.library.encode(text).ids == [token]:
                return text
        self.fail(f"no token of {token_ids} is text by itself")

    @staticmethod
    def answers(client):
        try:
            return len(client.generate([2], max_new_tokens=1)) == 1
        except grpc.RpcError:
            return False


if __name__ == "__main__":
    unittest.main()
