"""Tokenises conversations and marks the answers, whose tokens count in the loss.

A chat template renders a conversation (`chat_template.py`). The built-in one, `chat_template: plain`, renders

    <|system|>
    You are terse.
    <|user|>
    The capital of Gansu?
    <|assistant|>
    Lanzhou.

with a line break after each message but the tokenizer's end token after each answer. The loss covers what the
template adds to the prompt for an answer, its end token included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from isthmus.core.errors import DataError
from isthmus.data.samples import TokenSequence
from isthmus.data.tokenizer import Tokenizer

ChatMessage = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A rendered prompt and its answer."""

    prompt: str
    answer: str


Renderer = Callable[[Sequence[ChatMessage]], list[list[Turn]]]
"""Renders a conversation as runs of turns; the turns of one run are concatenated."""


def parse_messages(value: dict[str, Any], where: str) -> list[ChatMessage]:
    """Return the `messages` of one line of chat data; `DataError` naming `where` (file:line) if malformed."""
    messages = value.get("messages")
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"{where}: no 'messages' list, only {sorted(value)}",
            hint='a line of chat data is {"messages": [{"role": "user", "content": "..."}, ...]}',
        )
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
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


def tokenize_conversation(
    messages: Sequence[ChatMessage], render: Renderer, tokenizer: Tokenizer, max_tokens: int
) -> list[TokenSequence]:
    """Return a conversation as token sequences of at most `max_tokens` tokens.

    Turns are packed together while they fit. A turn longer than `max_tokens` is split; consecutive parts share one
    token, so that every answer token is a label exactly once. Sequences without a label are dropped.
    """
    pieces: list[TokenSequence] = []
    for run in render(messages):
        group: list[TokenSequence] = []
        for turn in run:
            piece = _encode_turn(turn, tokenizer)
            if group and sum(len(part.tokens) for part in (*group, piece)) > max_tokens:
                pieces.append(_concatenate(group))
                group = []
            group.append(piece)
        pieces.append(_concatenate(group))
    return [part for piece in pieces for part in _split(piece, max_tokens) if part.loss_mask[1:].any()]


def _encode_turn(turn: Turn, tokenizer: Tokenizer) -> TokenSequence:
    texts = [text.encode("utf-8", errors="replace").decode() for text in (turn.prompt, turn.answer)]
    prompt, answer = tokenizer.encode_rendered(texts)
    tokens = np.concatenate([prompt, answer]).astype(np.int32)
    return TokenSequence(tokens=tokens, loss_mask=np.arange(len(tokens)) >= len(prompt))


def _concatenate(sequences: Sequence[TokenSequence]) -> TokenSequence:
    return TokenSequence(
        tokens=np.concatenate([piece.tokens for piece in sequences]),
        loss_mask=np.concatenate([piece.loss_mask for piece in sequences]),
    )


def _split(sequence: TokenSequence, max_tokens: int) -> list[TokenSequence]:
    """Return `sequence` as windows of `max_tokens` tokens that overlap by one token."""
    starts = range(0, max(1, len(sequence.tokens) - 1), max_tokens - 1)
    return [
        TokenSequence(tokens=sequence.tokens[s : s + max_tokens], loss_mask=sequence.loss_mask[s : s + max_tokens])
        for s in starts
    ]
