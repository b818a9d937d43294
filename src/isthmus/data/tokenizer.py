"""Tokenizers: text to token ids, by bytes (no file needed) or by any `tokenizer.json`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer as HuggingFaceTokenizer

from isthmus.core.errors import DataError
from isthmus.core.files.model_tokenizer import tokenizer_file
from isthmus.core.job import BYTES_TOKENIZER
from isthmus.data.byte_tokenizer import ByteTokenizer

_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
_BATCH_TEXTS = 512
_MAX_SETTINGS_BYTES = 32 << 20


class Tokenizer(Protocol):
    """The interface that a data set needs of a tokenizer."""

    vocab_size: int
    end_id: int
    """Id of the token that ends a document or an answer."""
    padding_id: int
    """Id of the token that pads samples."""
    special_tokens: dict[str, str]
    """Special tokens by the name under which a chat template sees them, such as `eos_token`."""

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return the token ids of UTF-8 `texts`, one int `[L]` array each, without special tokens."""
        ...

    def encode_rendered(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of `texts` that a chat template rendered, one int `[L]` array each."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens` without special tokens."""
        ...


class FileTokenizer:
    """A `tokenizer.json`, read by the tokenizers library.

    `end_id` is `eos_token` of the adjacent `tokenizer_config.json`, or else a common end token; `padding_id` is
    `pad_token`, or else `end_id` (the loss ignores padding).
    """

    def __init__(self, file: Path) -> None:
        try:
            self._tokenizer = HuggingFaceTokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"cannot read tokenizer {file}: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        settings = tokenizer_settings(file.parent)
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1
        ends = (word for word in (_token_text(settings.get("eos_token")), *_END_TOKENS) if word in ids)
        end = next(ends, None)
        if end is None:
            raise DataError(
                f"tokenizer {file} has no token that ends a document",
                hint="set eos_token in tokenizer_config.json in the same folder",
            )
        self.end_id = ids[end]
        named = {name: _token_text(value) for name, value in settings.items() if name.endswith("_token")}
        self.special_tokens = {name: text for name, text in named.items() if text is not None} | {"eos_token": end}
        self.padding_id = ids.get(_token_text(settings.get("pad_token")) or end, self.end_id)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return the ids of each text, int32 `[L]`; invalid UTF-8 becomes the replacement character."""
        arrays: list[np.ndarray] = []
        for start in range(0, len(texts), _BATCH_TEXTS):
            batch = [text.decode("utf-8", errors="replace") for text in texts[start : start + _BATCH_TEXTS]]
            arrays += self.encode_rendered(batch)
        return arrays

    def encode_rendered(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text, int32 `[L]`."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens` without special tokens."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text


def open_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer `name`: `bytes`, a `tokenizer.json`, or a folder that contains one.

    Raises `DataError` if the file is missing, unreadable, or has no token that ends a document.
    """
    if name == BYTES_TOKENIZER:
        return ByteTokenizer()
    file = tokenizer_file(name)
    if not file.is_file():
        raise DataError(
            f"no tokenizer at {name}",
            hint="use 'bytes', a tokenizer.json, or a folder that contains one",
        )
    return FileTokenizer(file)


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Return `tokenizer_config.json` of `folder` as a dict; empty if missing."""
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return {}
    if file.stat().st_size > _MAX_SETTINGS_BYTES:
        raise DataError(f"{file} is larger than {_MAX_SETTINGS_BYTES >> 20} MiB", hint="check the file")
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not JSON: {error}") from error
    return settings if isinstance(settings, dict) else {}


def _token_text(token: Any) -> str | None:
    """Return the text of a special token, given as a string or as an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
