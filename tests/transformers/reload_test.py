#!/usr/bin/env python3
"""What moerl writes loads in transformers with equal logits, and moerl's log-probabilities are transformers'.

Needs torch and transformers (5.x); exits 77 (skipped) without. By hand:
    MOERL_SOURCE_DIR=. MOERL_BINARY_DIR=build/release python tests/transformers/reload_test.py
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

try:
    import torch
    import transformers
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

SOURCE = pathlib.Path(os.environ["MOERL_SOURCE_DIR"]).resolve()
MOERL = pathlib.Path(os.environ["MOERL_BINARY_DIR"]).resolve() / "bin" / "moerl"
CASES = sorted((SOURCE / "tests" / "golden" / "model").iterdir())


def moerl(*arguments, text=None):
    done = subprocess.run([MOERL, *map(str, arguments)], input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssertionError(f"moerl {arguments}: {done.stderr}")
    return done.stdout


def load(directory):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.eval()


def logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def logprobs(model, tokens):
    values = torch.log_softmax(logits(model, tokens), -1)
    return values[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def tokens_for(config, count=40):
    return torch.randint(config.vocab_size, (count,), generator=torch.Generator().manual_seed(1)).tolist()


class Reload(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.TemporaryDirectory()
        self.addCleanup(self.dir.cleanup)
        self.out = pathlib.Path(self.dir.name)

    def assert_same_logprobs(self, model, directory, tokens):
        line = moerl("logprobs", "--model", directory, "--compute", "fp32", text=json.dumps({"tokens": tokens}) + "\n")
        ours = torch.tensor(json.loads(line)["logprobs"][1:])
        self.assertLessEqual(float((ours - logprobs(model, tokens)).abs().max()), 1e-5)

    def test_exported_models_have_the_same_logits(self):
        for case in CASES:
            # The goldens' weights are bf16 values, so both types are exact.
            for compute in ("fp32", "bf16") if case.name.endswith("_small") else ("fp32",):
                with self.subTest(case=case.name, compute=compute):
                    out = self.out / f"{case.name}_{compute}"
                    moerl("export", "--model", case, "--out", out, "--compute", compute)
                    model = load(out)
                    tokens = tokens_for(model.config)
                    self.assertTrue(torch.equal(logits(load(case), tokens), logits(model, tokens)))
                    self.assert_same_logprobs(model, out, tokens)

    def test_fresh_models_load_also_in_shards(self):
        config = json.loads((SOURCE / "tests/golden/model/qwen3_moe_small/config.json").read_text())
        config.update(hidden_size=128, vocab_size=1000, moe_intermediate_size=64)
        (self.out / "config.json").write_text(json.dumps(config))
        moerl("init", "--config", self.out / "config.json", "--seed", 3, "--out", self.out / "fresh", "--compute", "fp32")
        moerl("export", "--model", self.out / "fresh", "--out", self.out / "shards", "--shard-mib", 1)
        self.assertGreater(len(list((self.out / "shards").glob("*.safetensors"))), 1)
        model = load(self.out / "shards")
        self.assert_same_logprobs(model, self.out / "shards", tokens_for(model.config))
        again = self.out / "again"
        moerl("init", "--config", self.out / "config.json", "--seed", 3, "--out", again, "--compute", "fp32")
        self.assertEqual((again / "model.safetensors").read_bytes(), (self.out / "fresh/model.safetensors").read_bytes())

    def test_upcycled_models_compute_what_the_dense_ones_did(self):
        for case in ("llama_small", "qwen3_small"):
            with self.subTest(case=case):
                dense = SOURCE / "tests/golden/model" / case
                out = self.out / case
                moerl("upcycle", "--model", dense, "--out", out, "--experts", 4, "--top-k", 2, "--compute", "fp32")
                tokens = tokens_for(load(dense).config)
                difference = (logits(load(dense), tokens) - logits(load(out), tokens)).abs().max()
                self.assertLessEqual(float(difference), 1e-4)
                self.assert_same_logprobs(load(out), out, tokens)


    def test_the_tokenizer_comes_along(self):
        dense, moe, again = self.out / "dense", self.out / "moe", self.out / "again"
        shutil.copytree(SOURCE / "tests/golden/model/llama_small", dense)
        golden = json.loads((SOURCE / "tests/golden/byte_level_tokenizer.json").read_text())
        (dense / "tokenizer.json").write_text(json.dumps(golden["tokenizer"]))
        (dense / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        (dense / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
        (dense / "generation_config.json").write_text('{"max_new_tokens": 7}')
        moerl("upcycle", "--model", dense, "--out", moe, "--experts", 4, "--top-k", 2)
        moerl("export", "--model", moe, "--out", again)
        text = "moerl says: héllo"
        for directory in (moe, again):
            source, tokenizer = (transformers.AutoTokenizer.from_pretrained(d) for d in (dense, directory))
            self.assertEqual(source(text)["input_ids"], tokenizer(text)["input_ids"])
            chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
            self.assertEqual(chat, "<user>hi")
            self.assertEqual(load(directory).generation_config.max_new_tokens, 7)


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    unittest.main(verbosity=2)
