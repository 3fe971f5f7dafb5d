"""The prompts and the reward of examples/own_model, without the model."""

import os
import sys
import unittest

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../examples/own_model"))
import prompts  # noqa: E402
import reward  # noqa: E402


class Prompts(unittest.TestCase):
    def test_no_word_is_both_trained_on_and_held_out(self):
        train, held_out = ({row["answer"] for row in part} for part in prompts.rows())
        self.assertEqual(set(), train & held_out)
        self.assertEqual(set(prompts.WORDS), train | held_out)
        self.assertEqual(prompts.NUM_HELD_OUT, len(held_out))

    def test_the_same_seed_gives_the_same_rows(self):
        self.assertEqual(prompts.rows(3), prompts.rows(3))
        self.assertNotEqual(prompts.rows(3), prompts.rows(4))


class Reward(unittest.TestCase):
    def test_a_whole_sentence_with_the_word_is_worth_one(self):
        for text in ("The river is very long.", "Do you see the Rivers?\n", '"A river runs here!'):
            self.assertEqual(1.0, reward.score(text, "river", is_truncated=False), text)

    def test_each_half_is_earned_alone(self):
        self.assertEqual(0.5, reward.score("The lake is very long.", "river", is_truncated=False))
        self.assertEqual(0.5, reward.score("The river is very long.", "river", is_truncated=True))

    def test_the_word_alone_or_half_a_sentence_is_not_a_whole_one(self):
        self.assertEqual(0.5, reward.score("River.", "river", is_truncated=False))
        self.assertEqual(0.5, reward.score("The river is very", "river", is_truncated=False))

    def test_a_longer_word_that_contains_it_does_not_count(self):
        self.assertEqual(0.5, reward.score("The riverbank is very long.", "river", is_truncated=False))
        self.assertEqual(0.0, reward.score("", "river", is_truncated=False))


if __name__ == "__main__":
    unittest.main()
