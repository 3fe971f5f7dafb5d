#!/usr/bin/env python3
"""Another reward for the task `reverse`: an eighth for every letter in its place, where the built-in one wants all eight.

    "$(scripts/python-env)" examples/own_reward.py [ADDRESS]
"""

import sys

CHARACTERS = "0123456789abcdefghijklmn+-*()=,:"  # the built-in tasks' vocabulary: token 2 is "0", 0 ends the text, 1 begins it


def text_of(token_ids):
    return "".join(CHARACTERS[i - 2] for i in token_ids if i >= 2)


def score(written, answer):
    in_place = sum(a == b for a, b in zip(written, answer))
    return in_place / max(len(written), len(answer))  # letters too many cost as much as letters missing


if __name__ == "__main__":
    from moerl import Environment, serve

    class PartialCredit(Environment):
        def reward(self, task, prompt, completion):
            return score(text_of(completion), task.answer)

    serve(PartialCredit(), sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7300")
