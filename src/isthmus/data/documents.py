"""Files to documents: a text file is one, a JSON Lines file one per line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from isthmus.core.errors import DataError
from isthmus.core.job import Data, Task
from isthmus.data.data_files import DataFile

Kind = Literal["text", "jsonl", "chat"]


def file_kind(name: str, data: Data, task: Task) -> Kind:
    """Return how file `name` is to be read.

    `auto` takes `.jsonl` as JSON Lines (of conversations where the task is `finetune`) and all else as text.
    Raises `DataError` where task and kind do not go together: fine-tuning takes conversations, and only it.
    """
    if data.format == "auto":
        kind: Kind = "text"
        if name.endswith(".jsonl"):
            kind = "chat" if task == "finetune" else "jsonl"
    else:
        kind = data.format
    if task == "finetune" and kind != "chat":
        raise DataError(
            f"{name} is read as {kind}, and task finetune needs conversations",
            hint="give JSON Lines with a 'messages' list per line, or use task continue",
        )
    if task != "finetune" and kind == "chat":
        raise DataError(
            f"{name} is read as conversations, and task {task} needs text",
            hint="use task finetune, or format jsonl and the text_field that holds text",
        )
    return kind


def read_documents(files: Sequence[DataFile], data: Data, task: Task) -> list[bytes]:
    """Return the documents of text and JSON Lines `files` in order, as UTF-8; empty ones are left out."""
    documents: list[bytes] = []
    for file in files:
        if file_kind(file.name, data, task) == "text":
            documents.append(file.content)
        else:
            documents.extend(_field(value, data.text_field, where) for where, value in json_lines(file))
    return [document for document in documents if document]


def json_lines(file: DataFile) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (`file:line`, object) of each line that is not blank.

    Raises `DataError` naming file and line where one is no JSON object.
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


def _field(value: dict[str, Any], field: str, where: str) -> bytes:
    if field not in value:
        raise DataError(
            f"{where}: no field '{field}', only {sorted(value)}",
            hint="set text_field to the field of the text",
        )
    text = value[field]
    if not isinstance(text, str):
        raise DataError(
            f"{where}: field '{field}' is {text!r:.60}, not text", hint="set text_field to another"
        )
    return text.encode("utf-8", errors="replace")
