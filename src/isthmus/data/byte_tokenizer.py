"""`ByteTokenizer`: one token per UTF-8 byte, and the same as files for Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from isthmus.core.files.model_tokenizer import BYTES_VOCABULARY, TOKENIZER_FILE

BYTES_SPECIAL_TOKENS = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
"""Names of ids 256, 257 and 258."""


class ByteTokenizer:
    """One token per UTF-8 byte: ids 0 to 255, then begin (256), end (257) and padding (258)."""

    vocab_size = BYTES_VOCABULARY
    begin_id = 256
    end_id = 257
    padding_id = 258
    special_tokens = BYTES_SPECIAL_TOKENS

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return the bytes of each text as ids, uint8 `[L]`."""
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]

    def encode_rendered(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of texts that a chat template rendered, int32 `[L]`; special tokens have one id."""
        return [np.array(one.ids, dtype=np.int32) for one in self._library.encode_batch(texts)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the bytes among `tokens`; invalid UTF-8 becomes the replacement character."""
        return bytes(one for one in tokens if one < self.begin_id).decode("utf-8", errors="replace")

    @cached_property
    def _library(self) -> LibraryTokenizer:
        return library_tokenizer()


def library_tokenizer() -> LibraryTokenizer:
    """Return the byte tokenizer as one of the tokenizers library, with equal ids."""
    # GPT-2's table of a printable character for every byte; a library without merges leaves each by itself.
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    characters = {chr(byte if byte in printable else next(others)): byte for byte in range(256)}
    tokenizer = LibraryTokenizer(models.BPE(vocab=characters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in BYTES_SPECIAL_TOKENS.values()])
    return tokenizer


def write_byte_tokenizer(folder: Path) -> None:
    """Write the files with which transformers' `AutoTokenizer` gives the ids of `ByteTokenizer`."""
    library_tokenizer().save(str(folder / TOKENIZER_FILE))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    text = json.dumps(settings | BYTES_SPECIAL_TOKENS, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
