"""Text at the edges: a thin view of a Hugging Face tokenizer. Everything else in moerl speaks token ids."""

from __future__ import annotations

import pathlib
from typing import Sequence


class Tokenizer:
    """Encodes and decodes with a tokenizer.json, given as the file or the model directory that holds it."""

    def __init__(self, path: str):
        try:
            import tokenizers
        except ImportError as error:
            raise ImportError("text needs the tokenizers package: pip install 'moerl[text]'") from error
        file = pathlib.Path(path)
        if file.is_dir():
            file = file / "tokenizer.json"
        if not file.exists():
            raise FileNotFoundError(f"no tokenizer.json at {file}; give a Hugging Face model directory or the file itself")
        self._tokenizer = tokenizers.Tokenizer.from_file(str(file))

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, special tokens written in it recognised, none added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids` without special tokens."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
