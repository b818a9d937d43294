"""`ProgressReader`: the steps that the program of a job with `engine: command` reports, as metrics of its rank.

The program appends lines to the file that `ISTHMUS_PROGRESS` names, each a JSON object with the whole number `step` and
any numbers beside it: `{"step": 12, "loss": 3.4, "step_s": 0.8}`. Whatever else is in the file is passed over.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress

from isthmus.core.messages.agent_messages import StepMetrics
from isthmus.core.messages.worker_folder import WorkerFolder, WorkerSpec, open_regular

MAX_LINE_BYTES = 4096
"""Longer lines are passed over."""
MAX_VALUES = 32
"""Most numbers of a line."""
MAX_NAME_CHARS = 64
_READ_BYTES = 1 << 18
"""Bytes that are read at once."""


class ProgressReader:
    """Reads what is new in a worker's progress file and appends it to the rank's metrics."""

    def __init__(self, folder: WorkerFolder, spec: WorkerSpec) -> None:
        self._folder, self._spec = folder, spec
        self._offset, self._rest = 0, b""

    def read(self) -> int:
        """Append the new complete lines to the metrics; return how many. On a full disk lines are lost."""
        try:
            with open_regular(self._folder.progress_path) as stream:
                stream.seek(self._offset)
                data = stream.read(_READ_BYTES)
        except OSError:
            return 0
        self._offset += len(data)
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest if len(rest) <= MAX_LINE_BYTES else rest[: MAX_LINE_BYTES + 1]
        found = [one for one in map(self._parse, lines) if one is not None]
        if found:
            with suppress(OSError), self._folder.metrics_path.open("ab") as stream:
                stream.write(b"".join(one.model_dump_json().encode() + b"\n" for one in found))
        return len(found)

    def read_rest(self) -> None:
        """Append all lines that the file has by now; what is written to it meanwhile is left."""
        try:
            size_bytes = self._folder.progress_path.lstat().st_size
        except OSError:
            return
        before = -1
        while before < self._offset < size_bytes:
            before = self._offset
            self.read()

    def _parse(self, line: bytes) -> StepMetrics | None:
        if len(line) > MAX_LINE_BYTES:
            return None
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(fields, dict):
            return None
        step = fields.pop("step", None)
        if not _is_step(step) or len(fields) > MAX_VALUES:
            return None
        values = {
            name: float(value)
            for name, value in fields.items()
            if name and len(name) <= MAX_NAME_CHARS and _is_finite_number(value)
        }
        return StepMetrics(
            job=self._spec.run, attempt=self._spec.attempt, rank=self._spec.rank, step=step, values=values
        )


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 10**9


def _is_finite_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    with suppress(OverflowError):
        return math.isfinite(float(value))
    return False
