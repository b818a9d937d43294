"""`Dataset`: samples by number, identical on every worker and after a restart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from isthmus.core.errors import DataError
from isthmus.core.files.model_tokenizer import require_vocabulary, tokenizer_name
from isthmus.core.job import BYTES_TOKENIZER, DataConfig, Job, TrainingTask
from isthmus.data.chat import parse_messages, tokenize_conversation
from isthmus.data.chat_template import ChatRenderer, ChatTemplate, find_chat_template
from isthmus.data.data_files import DataFile, read_files
from isthmus.data.documents import file_kind, read_documents, read_json_lines
from isthmus.data.holdout import hold_out_items, hold_out_tokens
from isthmus.data.sample_order import sample_order
from isthmus.data.samples import PackedSamples, Samples, StreamSamples
from isthmus.data.tokenizer import Tokenizer, open_tokenizer


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """A batch of n samples of S tokens: `input_ids` and `labels`, both int64 `[n, S]`.

    `labels[i, t]` is the token after `input_ids[i, t]`, or -100 where the loss ignores it.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor


class Dataset:
    """Training and validation samples of one job; created by `open_dataset`.

    Training samples form an endless sequence in which each epoch has its own permutation. A run that
    resumes after k samples continues with `train_batch(k, ...)`; a worker reads only its share of a
    batch.
    """

    def __init__(
        self,
        *,
        train: Samples,
        validation: Samples,
        vocab_size: int,
        seed: int,
        tokenizer: str = BYTES_TOKENIZER,
        template: ChatTemplate | None = None,
        num_skipped_files: int = 0,
    ) -> None:
        self.tokenizer, self.template = tokenizer, template
        self._train, self._validation, self._seed = train, validation, seed
        self.vocab_size = vocab_size
        self.num_samples = len(train)
        self.num_validation_samples = len(validation)
        self.num_skipped_files = num_skipped_files

    def train_batch(self, first_sample: int, num_samples: int) -> TokenBatch:
        """Return training samples `first_sample` to `first_sample + num_samples - 1`, across epochs.

        Raises `DataError` if the data set has fewer than `num_samples` samples.
        """
        self.check_job_fits(num_samples=num_samples)
        return _make_batch(self._train, sample_order(first_sample, num_samples, self.num_samples, self._seed))

    def validation_batch(self, num_samples: int) -> TokenBatch:
        """Return the same `num_samples` held-out samples at each call, repeated if fewer are held out.

        Raises `DataError` if nothing is held out.
        """
        if self.num_validation_samples == 0:
            raise DataError(
                "no data is held out for validation",
                hint="set data.validation_fraction above 0, or training.evaluate_every to 0",
            )
        return _make_batch(self._validation, sample_order(0, num_samples, self.num_validation_samples, seed=0))

    def check_job_fits(self, *, num_samples: int = 1, vocab_size: int | None = None) -> None:
        """Check that the data set fills a batch of `num_samples` and fits a model of `vocab_size` tokens.

        Raises `DataError` otherwise.
        """
        if self.num_samples < num_samples:
            raise DataError(
                f"the data yields {self.num_samples} samples, one batch needs {num_samples}",
                hint="use more data, a smaller global_batch_size or a shorter sequence_length",
            )
        if vocab_size is not None:
            require_vocabulary(self.tokenizer, self.vocab_size, vocab_size)

    def describe(self) -> list[str]:
        """Return lines for a log: the tokenizer, and the chat template if there is one."""
        lines = [f"tokenizer {self.tokenizer}: {self.vocab_size} tokens"]
        return lines if self.template is None else [*lines, str(self.template)]


def open_job_data(job: Job) -> Dataset:
    """Open the data of `job`, with its tokenizer; raises `DataError` if one is missing or malformed."""
    data = job.data.model_copy(update={"tokenizer": tokenizer_name(job)})
    training = job.training
    return open_dataset(data, task=job.task, sequence_length=training.sequence_length, seed=training.seed)


def open_dataset(data: DataConfig, *, task: TrainingTask, sequence_length: int, seed: int) -> Dataset:
    """Read, tokenise and pack `data` into samples of `sequence_length` tokens (S).

    Text documents are concatenated, with the tokenizer's end token after each. Conversations (task
    `finetune`) are rendered by the chat template and packed whole where they fit; only answers have
    labels. The result depends on the arguments and the files alone. Raises `DataError` for missing, empty
    or malformed data.
    """
    found = read_files(data.paths, data.max_bytes)
    tokenizer = open_tokenizer(data.tokenizer)
    template = find_chat_template(data, tokenizer.special_tokens) if task == "finetune" else None
    if template is None:
        train, validation = _pack_text(found.files, data, task, tokenizer, sequence_length)
    else:
        train, validation = _pack_conversations(found.files, data, template, tokenizer, sequence_length)
    dataset = Dataset(
        train=train,
        validation=validation,
        vocab_size=tokenizer.vocab_size,
        seed=seed,
        tokenizer=data.tokenizer,
        template=template,
        num_skipped_files=found.num_skipped,
    )
    dataset.check_job_fits()
    return dataset


def _pack_text(
    files: Sequence[DataFile],
    data: DataConfig,
    task: TrainingTask,
    tokenizer: Tokenizer,
    sequence_length: int,
) -> tuple[Samples, Samples]:
    documents = tokenizer.encode(read_documents(files, data, task))
    training, held_out = hold_out_tokens(documents, data.validation_fraction, sequence_length + 1)
    train, validation = (
        StreamSamples(_join_documents(part, tokenizer), sequence_length, tokenizer.padding_id)
        for part in (training, held_out)
    )
    return train, validation


def _join_documents(documents: Sequence[np.ndarray], tokenizer: Tokenizer) -> np.ndarray:
    """Concatenate documents (int `[L]` each), with the end token after each, as uint16 or int32 `[T]`."""
    total = sum(len(document) + 1 for document in documents)
    stream = np.empty(total, dtype=np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.int32)
    start = 0
    for document in documents:
        stream[start : start + len(document)] = document
        start += len(document) + 1
        stream[start - 1] = tokenizer.end_id
    return stream


def _pack_conversations(
    files: Sequence[DataFile],
    data: DataConfig,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    sequence_length: int,
) -> tuple[Samples, Samples]:
    conversations = []
    with ChatRenderer(template) as render:
        for file in files:
            file_kind(file.name, data, "finetune")
            for where, value in read_json_lines(file):
                messages = parse_messages(value, where)
                conversations.append(tokenize_conversation(messages, render, tokenizer, sequence_length + 1))
    tokens = [np.concatenate([piece.tokens for piece in pieces]) for pieces in conversations]
    held_out = hold_out_items(tokens, data.validation_fraction)
    train, validation = (
        PackedSamples(
            [piece for i, pieces in enumerate(conversations) if (i in held_out) == wanted for piece in pieces],
            sequence_length,
            tokenizer.padding_id,
        )
        for wanted in (False, True)
    )
    return train, validation


def _make_batch(samples: Samples, numbers: np.ndarray) -> TokenBatch:
    input_ids, labels = samples.rows(numbers)
    return TokenBatch(input_ids=torch.from_numpy(input_ids.copy()), labels=torch.from_numpy(labels.copy()))
