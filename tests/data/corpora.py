"""Writing small data sets for the tests of `data`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from isthmus.core.job import DataConfig, TrainingTask
from isthmus.data import Dataset, open_dataset


def write_texts(folder: Path, texts: Sequence[str]) -> str:
    """Write each text to a file of its own and return the folder as a data path."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, text in enumerate(texts):
        (folder / f"{index:04d}.txt").write_text(text, encoding="utf-8")
    return str(folder)


def write_lines(file: Path, values: Sequence[Any]) -> str:
    """Write `values` as JSON Lines and return the file as a data path."""
    file.write_text("".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values), encoding="utf-8")
    return str(file)


def conversation(*contents: str) -> dict[str, Any]:
    """Return a line of chat data whose messages are by user and assistant in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]}


def opened(
    *paths: str, task: TrainingTask = "pretrain", sequence_length: int = 16, seed: int = 0, **fields: Any
) -> Dataset:
    """Open a data set of `paths`: bytes and the plain chat template, no held-out split, unless `fields` say else."""
    defaults = {"validation_fraction": 0.0, "tokenizer": "bytes"}
    if "tokenizer" not in fields and task == "finetune":
        defaults["chat_template"] = "plain"
    data = DataConfig(paths=paths, **{**defaults, **fields})
    return open_dataset(data, task=task, sequence_length=sequence_length, seed=seed)


def write_tokenizer(
    folder: Path, *, settings: dict[str, Any] | None = None, specials: Sequence[str] = (), vocab_size: int = 300
) -> Path:
    """Train a byte-level BPE tokenizer on a few words, write it to `folder` and return the folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["user assistant system hello world the capital of Gansu is Lanzhou"] * 3, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
