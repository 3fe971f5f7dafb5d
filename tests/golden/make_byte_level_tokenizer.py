#!/usr/bin/env python3
"""Writes byte_level_tokenizer.json: a small byte-level tokenizer.json and what the library that defines the format decodes.

    pip install tokenizers
    python3 tests/golden/make_byte_level_tokenizer.py > tests/golden/byte_level_tokenizer.json
"""

import json

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXTS = [
    "Natalia sold 48/2 = 24 clips in May.\n#### 72",
    "  leading, double  spaces and\ttabs\r\n",
    "caf\u00e9 \u4f60\u597d \U0001f600 na\u00efve \u00bd",
    "\\boxed{\\frac{1}{2}} $1,234.50 100%",
    "",
    "def f(x):\n    return x**2  # ok",
]

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                              special_tokens=["<|endoftext|>", "<|im_end|>"], show_progress=False)
tokenizer.train_from_iterator(TEXTS * 4, trainer)
tokenizer.add_tokens(["<think>"])

cases = []
for text in TEXTS + ["<think>a<|im_end|>b"]:
    ids = tokenizer.encode(text).ids
    cases.append({"ids": ids, "text": tokenizer.decode(ids, skip_special_tokens=True)})
print(json.dumps({"generator": {"script": "tests/golden/make_byte_level_tokenizer.py", "tokenizers": tokenizers.__version__},
                  "tokenizer": json.loads(tokenizer.to_str()), "cases": cases}))
