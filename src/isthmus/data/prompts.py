"""`PromptSet`: the prompts and answers of a job with `task: rl`, tokenised, by number."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.core.errors import DataError
from isthmus.core.files.model_tokenizer import require_vocabulary, tokenizer_name
from isthmus.core.job import Job
from isthmus.data.chat_template import ChatTemplate
from isthmus.data.data_files import read_files
from isthmus.data.documents import read_json_lines
from isthmus.data.holdout import hold_out_items
from isthmus.data.sample_order import sample_order
from isthmus.data.tokenizer import Tokenizer, open_tokenizer

_KNOWN_PLACES = 4096
"""Prompts whose places in the order are kept."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt: its text, its tokens, and the answer that rewards compare with."""

    text: str
    tokens: tuple[int, ...]
    answer: str


class PromptSet:
    """The prompts of one job; created by `open_prompts`.

    Training prompts form an endless sequence in which each epoch has its own permutation; some are held out.
    """

    template: ChatTemplate | None = None

    def __init__(
        self, train: Sequence[Prompt], held_out: Sequence[Prompt], tokenizer: Tokenizer, name: str, seed: int,
        stops: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self._train, self.held_out, self._tokenizer, self._seed = train, tuple(held_out), tokenizer, seed
        self.tokenizer, self.vocab_size, self.end_id = name, tokenizer.vocab_size, tokenizer.end_id
        # Each sample of a prompt asks for it at its start and for its reward, the order takes .2 ms of a core.
        self._place = functools.lru_cache(_KNOWN_PLACES)(self._find_place)
        self.stop_tokens = frozenset({self.end_id, *stops})
        """Tokens that end a turn of the model: the end token, and what the job's environment names."""

    def prompt(self, number: int) -> Prompt:
        """Return training prompt `number`, from 0."""
        return self._train[self._place(number)]

    def text_of(self, tokens: Sequence[int]) -> str:
        """Return the text of a response, without the token that ends it."""
        kept = tokens[:-1] if tokens and tokens[-1] == self.end_id else tokens
        return self._tokenizer.decode(kept)

    def _find_place(self, number: int) -> int:
        return int(sample_order(number, 1, len(self._train), self._seed)[0])

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, without special tokens."""
        return tuple(int(one) for one in self._tokenizer.encode([text.encode("utf-8", errors="replace")])[0])

    def describe(self) -> list[str]:
        """Return lines for a log."""
        counts = f"{len(self._train):,} prompts, {len(self.held_out):,} held out"
        return [f"tokenizer {self.tokenizer}: {self.vocab_size} tokens", counts]


def open_prompts(job: Job, vocab_size: int | None = None) -> PromptSet:
    """Open the prompts of `job` for a model of `vocab_size` tokens.

    Raises `DataError` for lines without a prompt or an answer, prompts longer than the job's `max_prompt_tokens`, and a
    tokenizer of more tokens than the model has, and a stop of the environment that is not one token; raises
    `ValueError` for a job of another task.
    """
    if job.rl is None:
        raise ValueError(f"job {job.name} has task {job.task}")
    name = tokenizer_name(job)
    tokenizer = open_tokenizer(name)
    if vocab_size is not None:
        require_vocabulary(name, tokenizer.vocab_size, vocab_size)
    lines = [
        (where, _field(value, "prompt", where), _field(value, "answer", where))
        for file in read_files(job.data.paths, job.data.max_bytes).files
        for where, value in read_json_lines(file)
    ]
    if not lines:
        raise DataError("the data has no prompt", hint="provide JSON Lines with a 'prompt' and an 'answer'")
    encoded = tokenizer.encode([text.encode("utf-8", errors="replace") for _, text, _ in lines])
    found = []
    for (where, text, answer), tokens in zip(lines, encoded, strict=True):
        if not 0 < len(tokens) <= job.rl.max_prompt_tokens:
            raise DataError(
                f"{where}: the prompt has {len(tokens)} tokens, max_prompt_tokens is {job.rl.max_prompt_tokens}",
                hint=f"shorten it; nearest valid rl.max_prompt_tokens: {max(len(tokens), 1)}",
            )
        found.append(Prompt(text=text, tokens=tuple(int(one) for one in tokens), answer=answer))
    held_out = hold_out_items(encoded, job.data.validation_fraction)
    train = [one for number, one in enumerate(found) if number not in held_out]
    rest = [one for number, one in enumerate(found) if number in held_out]
    return PromptSet(train, rest, tokenizer, name, job.training.seed, _stops(job, tokenizer, name))


def _stops(job: Job, tokenizer: Tokenizer, name: str) -> list[int]:
    """Return the tokens by which the job's environment ends turns."""
    texts = () if job.rl is None or job.rl.environment is None else job.rl.environment.stop
    found = []
    for text, tokens in zip(texts, tokenizer.encode([one.encode() for one in texts]), strict=True):
        if len(tokens) != 1:
            raise DataError(
                f"rl.environment.stop: '{text}' is {len(tokens)} tokens of tokenizer {name}",
                hint="name texts that are one token each; the end token ends a turn in any case",
            )
        found.append(int(tokens[0]))
    return found


def _field(value: dict[str, Any], field: str, where: str) -> str:
    text = value.get(field)
    if not isinstance(text, str):
        what = "is missing" if text is None else f"is {text!r:.60}, not text"
        raise DataError(f"{where}: '{field}' {what}", hint="each line has a 'prompt' and an 'answer', both text")
    return text
