"""The README's changed reward, by the README's own commands: served by Python, asked by a run, and what it trains on."""

import json
import os
import pathlib
import shlex
import socket
import subprocess
import sys
import tempfile
import unittest

import grpc

BIN = os.path.abspath(sys.argv.pop(1))
SOURCE = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(SOURCE / "examples"))
import own_reward  # noqa: E402

ADDRESS = "127.0.0.1:7300"  # the README's
# Three steps from the first weights: a warm start would take most of the test.
SHORT = ["--set", "trainer.warm_start.max_steps=0", "--set", "trainer.num_steps=3", "--set", "task.num_held_out=16"]


def command(word):
    """The one command of the README that has `word`, as a list."""
    line, = (line for line in (SOURCE / "README.md").read_text().splitlines() if line.startswith("    ") and word in line)
    return shlex.split(line.split("   #")[0])


class Score(unittest.TestCase):
    def test_every_letter_in_its_place_counts_and_length_too(self):
        self.assertEqual(1.0, own_reward.score("abcdefgh", "abcdefgh"))
        self.assertEqual(0.875, own_reward.score("abcdefgx", "abcdefgh"))
        self.assertEqual(0.5, own_reward.score("abcd", "abcdefgh"))
        self.assertEqual(0.8, own_reward.score("abcdefghij", "abcdefgh"))
        self.assertEqual(0.0, own_reward.score("", "abcdefgh"))

    def test_text_is_what_the_tokens_say_without_the_special_ones(self):
        self.assertEqual("an=0:", own_reward.text_of([1, 12, 25, 31, 2, 33, 0]))


class Run(unittest.TestCase):
    def test_the_commands_of_the_readme_train_on_the_reward_in_python(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        python, script, *rest = command("examples/own_reward.py")
        self.assertEqual(("$(scripts/python-env)", []), (python, rest))
        program, *run = command("name=own_reward")
        self.assertEqual("build/release/bin/moerl", program)
        self.assertEqual(1, sum(ADDRESS in word for word in run))

        directory = tempfile.TemporaryDirectory(prefix="moerl_own_reward_test.")
        self.addCleanup(directory.cleanup)
        os.symlink(SOURCE / "examples", os.path.join(directory.name, "examples"))
        server = subprocess.Popen([sys.executable, script, address], cwd=directory.name, stdout=subprocess.DEVNULL)
        self.addCleanup(lambda: (server.kill(), server.wait()))
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(timeout=60)
        done = subprocess.run([os.path.join(BIN, "moerl"), *(word.replace(ADDRESS, address) for word in run), *SHORT],
                              cwd=directory.name, capture_output=True, text=True, timeout=200)
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
        metrics, = pathlib.Path(directory.name).glob("runs/*/metrics.jsonl")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        self.assertEqual([1, 2, 3], [row["step"] for row in rows])
        for row in rows:
            self.assertEqual((0, 0), (row["num_groups_dropped"], row["max_abs_mismatch"]))
            # Random letters are rarely all right and some are often: the built-in reward would be the pass rate.
            self.assertLess(row["pass_rate"], 0.02)
            self.assertGreater(row["reward_mean"], row["pass_rate"] + 0.01)


if __name__ == "__main__":
    unittest.main()
