"""Tokenises conversations and marks the answers, whose tokens count in the loss.

The chat template of the tokenizer folder is used if there is one (`chat_template.py`). Otherwise a
conversation is rendered as

    <|system|>
    You are terse.
    <|user|>
    The capital of Gansu?
    <|assistant|>
    Lanzhou.

in plain text, with a line break after each message but the tokenizer's end token after each answer. The loss
covers the answers and their end tokens.
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
    """A rendered prompt and its answer."""

    prompt: str
    answer: str
    closed: bool = False
    """Whether the answer's text already ends the turn, so that it needs no end token."""


Render = Callable[[Sequence[Message]], list[list[Exchange]]]
"""Renders a conversation as runs of turns; the turns of one run are concatenated."""


def check_messages(value: dict[str, Any], where: str) -> list[Message]:
    """Return the `messages` of one line of chat data; `DataError` naming `where` (file:line) if malformed."""
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
                f"{where}: message {message!r:.80} lacks a text role and content",
                hint='a message is {"role": "user", "content": "..."}',
            )
    if all(message["role"] != "assistant" for message in messages):
        raise DataError(
            f"{where}: no message of role 'assistant' to train on",
            hint="remove the line, or check the role names",
        )
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def plain_template(messages: Sequence[Message]) -> list[list[Exchange]]:
    """Render with the template at the top of this file; drop messages after the last answer."""
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
    """Return a conversation as token sequences of at most `width` tokens.

    Turns are packed together while they fit. A turn longer than `width` is split; consecutive parts share one
    token, so that every answer token is a label exactly once. Sequences without a label are dropped.
    """
    pieces: list[Piece] = []
    for run in render(messages):
        group: list[Piece] = []
        for turn in run:
            piece = _encode(turn, tokenizer)
            if group and sum(len(part.tokens) for part in (*group, piece)) > width:
                pieces.append(_join(group))
                group = []
            group.append(piece)
        pieces.append(_join(group))
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
    """Return `piece` as windows of `width` tokens that overlap by one token."""
    starts = range(0, max(1, len(piece.tokens) - 1), width - 1)
    return [Piece(tokens=piece.tokens[s : s + width], learned=piece.learned[s : s + width]) for s in starts]
