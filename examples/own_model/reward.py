#!/usr/bin/env python3
"""A reward served over gRPC: half for a sentence with the word that was asked for, half for one that is whole and short.

    build/venv/bin/python examples/own_model/reward.py build/own_model/dense [ADDRESS]
"""

import re
import sys

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
WORDS_MIN = 4  # fewer are no sentence


def score(text, word, is_truncated):
    words = re.findall(r"[a-z']+", text.lower())
    has_word = word in words or word + "s" in words
    is_whole = not is_truncated and len(words) >= WORDS_MIN and text.rstrip().endswith((".", "!", "?"))
    return 0.5 * has_word + 0.5 * is_whole


if __name__ == "__main__":
    from moerl import Environment, Step, serve

    class Sentence(Environment):
        def prompt(self, task, text):
            return self.tokenizer.encode(CHAT.format(text))

        def step(self, task, transcript):
            answer = transcript[-1]
            return Step(score(self.tokenizer.decode(answer.token_ids), task.answer, answer.is_truncated))

    serve(Sentence.with_tokenizer(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1:7300")
