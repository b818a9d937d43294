"""Splits files into documents: one per text file, one per line of a JSON Lines file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from isthmus.core.errors import DataError
from isthmus.core.job import DataConfig, TrainingTask
from isthmus.data.data_files import DataFile

FileKind = Literal["text", "jsonl", "chat", "prompts"]


def file_kind(name: str, data: DataConfig, task: TrainingTask) -> FileKind:
    """Return the format in which to read file `name`.

    `auto` reads `.jsonl` as JSON Lines (conversations for task `finetune`) and everything else as text.
    Raises `DataError` unless exactly the task `finetune` reads conversations.
    """
    if data.format == "auto":
        kind: FileKind = "text"
        if name.endswith(".jsonl"):
            kind = "chat" if task == "finetune" else "jsonl"
    else:
        kind = data.format
    if task == "finetune" and kind != "chat":
        raise DataError(
            f"{name} has format {kind}, but task finetune needs conversations",
            hint="provide JSON Lines with a 'messages' list per line, or use task continue",
        )
    if kind == "prompts":
        raise DataError(f"{name} has format prompts, but task {task} needs text", hint="use task rl, or another format")
    if task != "finetune" and kind == "chat":
        raise DataError(
            f"{name} has format chat, but task {task} needs text",
            hint="use task finetune, or set format: jsonl and text_field",
        )
    return kind


def read_documents(files: Sequence[DataFile], data: DataConfig, task: TrainingTask) -> list[bytes]:
    """Return the non-empty documents of text and JSON Lines `files`, in order, as UTF-8."""
    documents: list[bytes] = []
    for file in files:
        if file_kind(file.name, data, task) == "text":
            documents.append(file.content)
        else:
            documents.extend(_text_field(value, data.text_field, where) for where, value in read_json_lines(file))
    return [document for document in documents if document]


def read_json_lines(file: DataFile) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`file:line`, object) for each non-blank line.

    Raises `DataError` naming file and line for anything but a JSON object.
    """
    for number, line in enumerate(file.content.split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{file.name}:{number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{where}: not JSON: {error}", hint="each line of a .jsonl file is one JSON object"
            ) from error
        if not isinstance(value, dict):
            raise DataError(
                f"{where}: a JSON {type(value).__name__}, not an object",
                hint="each line of a .jsonl file is one JSON object",
            )
        yield where, value


def _text_field(value: dict[str, Any], field: str, where: str) -> bytes:
    if field not in value:
        raise DataError(
            f"{where}: no field '{field}', only {sorted(value)}",
            hint="set text_field to the field that contains the text",
        )
    text = value[field]
    if not isinstance(text, str):
        raise DataError(f"{where}: field '{field}' is {text!r:.60}, not text", hint="set text_field to another field")
    return text.encode("utf-8", errors="replace")
