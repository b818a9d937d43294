"""The tokenizer of a job: found beside the model, pinned at submission, and checked against the vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from isthmus.core.bounded_file import read_within
from isthmus.core.errors import DataError, FileError
from isthmus.core.job import BYTES_TOKENIZER, MODEL_TOKENIZER, Job
from isthmus.core.model import Model, config_path

TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_FILES = (
    TOKENIZER_FILE, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "vocab.txt", "merges.txt", TEMPLATE_FILE,
)  # fmt: skip
"""Names of the files that make up a tokenizer in a Hugging Face folder."""
BYTES_VOCABULARY = 259
"""Ids of the tokenizer `bytes`: one per byte, then begin, end and padding."""
MAX_TOKENIZER_BYTES = 256 << 20
"""Largest `tokenizer.json`."""


def tokenizer_file(name: str) -> Path:
    """Return the path of the `tokenizer.json` at a file or folder name."""
    given = Path(name).expanduser()
    return given / TOKENIZER_FILE if given.is_dir() else given


def tokenizer_paths(name: str | None) -> list[str]:
    """Return the path of a tokenizer, and of the files beside a `tokenizer.json` that belong to it."""
    if name is None:
        return []
    given = Path(name)
    beside = [str(given.with_name(file)) for file in TOKENIZER_FILES] if given.name == TOKENIZER_FILE else []
    return list(dict.fromkeys([name, *beside]))


def model_tokenizer(model: str | Path) -> Path | None:
    """Return the `tokenizer.json` in the folder of `model`, or None."""
    file = config_path(model).parent / TOKENIZER_FILE
    return file if file.is_file() else None


def pin_tokenizer(job: Job) -> Job:
    """Return `job` with the tokenizer `model` replaced by its path, or by `bytes` if the model has none.

    The choice is made once, at submission, so that all sites use the same tokenizer.
    """
    if job.data.tokenizer != MODEL_TOKENIZER:
        return job
    found = model_tokenizer(job.model)
    name = BYTES_TOKENIZER if found is None else str(found)
    return job.model_copy(update={"data": job.data.model_copy(update={"tokenizer": name})})


def tokenizer_name(job: Job) -> str:
    """Return the tokenizer of `job`: a path or `bytes`; `DataError` for a model without the one that it names."""
    if job.data.tokenizer != MODEL_TOKENIZER:
        return job.data.tokenizer
    found = model_tokenizer(job.model)
    if found is None:
        raise DataError(
            f"no {TOKENIZER_FILE} beside the model {job.model}",
            hint="add it, or set data.tokenizer to the path of one, or to 'bytes' (one token per byte)",
        )
    return str(found)


def describe_tokenizer(asked: Job, pinned: Job) -> str:
    """Return which tokenizer the job uses and why, where `asked` is the job before `pin_tokenizer`."""
    name = pinned.data.tokenizer
    if name != BYTES_TOKENIZER:
        return f"tokenizer: {name}" + (", the model's own" if asked.data.tokenizer == MODEL_TOKENIZER else "")
    if asked.data.tokenizer == BYTES_TOKENIZER:
        return "tokenizer: bytes, one token per byte, as data.tokenizer says"
    return (
        f"tokenizer: bytes, one token per byte, since there is no {TOKENIZER_FILE} beside the model {asked.model}; "
        "set data.tokenizer to use another"
    )


def check_vocabulary(job: Job, model: Model) -> None:
    """Raise `DataError` if the tokenizer of a pinned `job` has ids beyond the vocabulary of `model`.

    A tokenizer that this machine cannot see is left to the workers, which check the same.
    """
    name = job.data.tokenizer
    if job.compute == "virtual" or name == MODEL_TOKENIZER:
        return
    size = BYTES_VOCABULARY if name == BYTES_TOKENIZER else _vocabulary_size(tokenizer_file(name))
    if size is not None:
        require_vocabulary(name, size, model.vocab_size)


def require_vocabulary(name: str, tokenizer_size: int, model_size: int) -> None:
    """Raise `DataError` if tokenizer `name` has more ids than the model's vocabulary."""
    if tokenizer_size > model_size:
        raise DataError(
            f"the tokenizer {name} has {tokenizer_size} tokens, the model only {model_size}",
            hint="use the tokenizer of the model, or a model with a larger vocab_size",
        )


def check_chat_template(job: Job) -> None:
    """Raise `DataError` if a pinned `job` trains on conversations and, as far as this machine sees, has no template.

    A tokenizer that is not on this machine is left to the workers, which check the same.
    """
    if job.task != "finetune" or job.compute == "virtual" or job.data.chat_template is not None:
        return
    name = job.data.tokenizer
    if name == BYTES_TOKENIZER:
        raise missing_template(name)
    folder = tokenizer_file(name).parent
    if not tokenizer_file(name).is_file() or (folder / TEMPLATE_FILE).is_file():
        return
    try:
        settings = json.loads(read_within(folder / "tokenizer_config.json").decode("utf-8"))
    except FileNotFoundError:
        settings = {}
    except (OSError, ValueError, RecursionError, FileError):
        return
    if not (isinstance(settings, dict) and settings.get("chat_template")):
        raise missing_template(name)


def missing_template(tokenizer: str) -> DataError:
    """Return the error for conversations without a chat template."""
    return DataError(
        f"the data are conversations, and tokenizer {tokenizer} has no chat template",
        hint="set data.chat_template to a Jinja template, to the path of one, or to 'plain' (a built-in one); "
        f"or add {TEMPLATE_FILE} beside the tokenizer",
    )


def _vocabulary_size(file: Path) -> int | None:
    """Return the highest id of a `tokenizer.json` plus one; None if the file is missing or of another form."""
    try:
        if file.stat().st_size > MAX_TOKENIZER_BYTES:
            raise DataError(f"tokenizer {file} is larger than {MAX_TOKENIZER_BYTES >> 20} MiB", hint="check the path")
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        return None
    except (ValueError, RecursionError) as error:
        raise DataError(f"tokenizer {file} is not JSON: {error}", hint="give a tokenizer.json") from error
    return max(_ids(document), default=-1) + 1 or None


def _ids(document: Any) -> list[int]:
    """Return ids of a tokenizer's JSON, the highest among them."""
    if not isinstance(document, dict):
        return []
    model, added = document.get("model"), document.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    ids += [len(vocabulary) - 1] if isinstance(vocabulary, list) else []  # Unigram: the id is the position
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    return [one for one in ids if isinstance(one, int)]
