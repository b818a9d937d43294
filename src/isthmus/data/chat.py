"""Conversations to pieces of tokens: what the model reads, and which of it (the answers) it learns.

A tokenizer folder with a chat template of its own is obeyed (`chat_template.py`). Otherwise a conversation
reads

    <|system|>
    You are terse.
    <|user|>
    The capital of Gansu?
    <|assistant|>
    Lanzhou.

as plain text, each message followed by a line break, save that an answer ends with the tokenizer's end token;
the answers and their end tokens are learned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from isthmus.core.errors import DataError
from isthmus.data.samples import Piece
from isthmus.data.tokenizer import Tokenizer

Message = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """A prompt and the answer to it, rendered; `closed` where the answer's text itself ends the turn."""

    prompt: str
    answer: str
    closed: bool = False


Render = Callable[[Sequence[Message]], list[list[Exchange]]]
"""A conversation to runs of exchanges; what one run holds is read one after the other."""


def check_messages(value: dict[str, Any], where: str) -> list[Message]:
    """Return the `messages` of a line of chat data; `where` is its file and line, for the `DataError`."""
    messages = value.get("messages")
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"{where}: no 'messages' list, only {sorted(value)}",
            hint='a line of chat data is {"messages": [{"role": "user", "content": "..."}, ...]}',
        )
    for message in messages:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise DataError(
                f"{where}: message {message!r:.80} has no role and content as text",
                hint='a message is {"role": "user", "content": "..."}',
            )
    if all(message["role"] != "assistant" for message in messages):
        raise DataError(
            f"{where}: no message of role 'assistant', so nothing to learn",
            hint="leave the line out, or check the names of the roles",
        )
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def plain_template(messages: Sequence[Message]) -> list[list[Exchange]]:
    """Render by the template at the top of this file; messages after the last answer are left out."""
    run: list[Exchange] = []
    prompt = ""
    for message in messages:
        if message["role"] == "assistant":
            run.append(Exchange(prompt=f"{prompt}<|assistant|>\n", answer=message["content"]))
            prompt = ""
        else:
            prompt += f"<|{message['role']}|>\n{message['content']}\n"
    return [run]


def conversation_pieces(
    messages: Sequence[Message], render: Render, tokenizer: Tokenizer, width: int
) -> list[Piece]:
    """Return a conversation as pieces of at most `width` tokens.

    Exchanges stay together while they fit. A piece that would be too long is divided between two exchanges,
    and inside one only where the exchange itself is longer than `width`: then consecutive pieces share a
    token, so that every token of the answer is still a label once. Pieces without any label are left out.
    """
    pieces: list[Piece] = []
    for run in render(messages):
        together: list[Piece] = []
        for exchange in run:
            piece = _encode(exchange, tokenizer)
            if together and sum(len(part.tokens) for part in (*together, piece)) > width:
                pieces.append(_join(together))
                together = []
            together.append(piece)
        pieces.append(_join(together))
    return [part for piece in pieces for part in _cut(piece, width) if part.learned[1:].any()]


def _encode(exchange: Exchange, tokenizer: Tokenizer) -> Piece:
    texts = [text.encode("utf-8", errors="replace") for text in (exchange.prompt, exchange.answer)]
    prompt, answer = tokenizer.encode(texts)
    end = [] if exchange.closed else [tokenizer.end]
    tokens = np.concatenate([prompt, answer, np.array(end, dtype=np.int32)]).astype(np.int32)
    return Piece(tokens=tokens, learned=np.arange(len(tokens)) >= len(prompt))


def _join(pieces: Sequence[Piece]) -> Piece:
    return Piece(
        tokens=np.concatenate([piece.tokens for piece in pieces]),
        learned=np.concatenate([piece.learned for piece in pieces]),
    )


def _cut(piece: Piece, width: int) -> list[Piece]:
    """Return `piece` as windows of `width` tokens, each beginning with the last token of the one before."""
    starts = range(0, max(1, len(piece.tokens) - 1), width - 1)
    return [Piece(tokens=piece.tokens[s : s + width], learned=piece.learned[s : s + width]) for s in starts]
