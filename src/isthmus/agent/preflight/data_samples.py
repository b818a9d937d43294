"""`check_rows`: the first rows of a JSON Lines file have the form that a job's data need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from isthmus.core.errors import InputError

SAMPLE_BYTES = 64 << 10
"""Bytes of a file that are parsed; a row that is cut at the end is left out."""

MAX_ROWS = 100


def check_rows(file: Path, form: str) -> None:
    """Check the first rows of `file`; `form` is `FORMAT:TEXT_FIELD` with a format of `data.format`.

    Raises `InputError` with file and line for a row that is not JSON, has no text under the field, or, in chats, has
    no list of messages. Text files have no rows.
    """
    kind, _, text_field = form.partition(":")
    if kind == "text" or (kind == "auto" and file.suffix != ".jsonl"):
        return
    with file.open("rb") as stream:
        content = stream.read(SAMPLE_BYTES + 1)
    rows = content[:SAMPLE_BYTES].split(b"\n")
    if len(content) > SAMPLE_BYTES:
        rows.pop()
    for number, row in enumerate(rows[:MAX_ROWS], start=1):
        if row.strip():
            fields = {"chat": (), "prompts": ("prompt", "answer")}.get(kind, (text_field,))
            _check_row(f"{file}:{number}", row, fields)


def _check_row(where: str, row: bytes, texts: tuple[str, ...]) -> None:
    """Raise `InputError` unless the row has the fields `texts`, all text; without any it is a chat."""
    try:
        value: Any = json.loads(row)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{where}: not a line of JSON: {error}", hint="correct the line, or set data.format"
        ) from error
    fields = sorted(value)[:10] if isinstance(value, dict) else []
    if not texts:
        messages = value.get("messages") if isinstance(value, dict) else None
        if not isinstance(messages, list) or not messages or not all(_is_message(one) for one in messages):
            raise InputError(
                f"{where}: no list 'messages' of role and content, only {fields}",
                hint='a line of chat data is {"messages": [{"role": "user", "content": "..."}, ...]}',
            )
        return
    for name in texts:
        if not isinstance(value, dict) or not isinstance(value.get(name), str):
            hint = "set data.text_field" if len(texts) == 1 else "each line has a prompt and an answer, both text"
            raise InputError(f"{where}: no text under '{name}', only {fields}", hint=hint)


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)
