"""`HolderRecord`: what an agent knows of its holder job, on disk, and when the next one may be submitted."""

from __future__ import annotations

import uuid
from pathlib import Path

from isthmus.core.base_model import FrozenModel
from isthmus.core.messages.worker_folder import write_atomically

MAX_PAUSE_S = 60.0
"""Longest pause between holder jobs that end at once: one that serves again is noticed within it."""


class HolderRecord(FrozenModel):
    """The present holder job `number` of the agent's `key`, and the troubles before it.

    `accepted`: Ray has it. `answered`: it has told the state of a hold. `num_failures`: how many holders in a row ended
    without being asked to, `trouble` why the last one did. The next is submitted `next_s` after the start `boot` of
    this machine, at once in any other.
    """

    key: str
    number: int = 1
    accepted: bool = False
    answered: bool = False
    num_failures: int = 0
    trouble: str = ""
    boot: str = ""
    next_s: float = 0.0

    def after(self, trouble: str, boot: str, now_s: float) -> HolderRecord:
        """Return the record of the next holder after the present one ended with `trouble`, "" for a normal end."""
        before = 0 if self.answered else self.num_failures
        num_failures = before + 1 if trouble else 0
        return HolderRecord(
            key=self.key, number=self.number + 1, num_failures=num_failures, trouble=trouble, boot=boot,
            next_s=now_s + holder_pause_s(num_failures),
        )  # fmt: skip

    def may_submit(self, boot: str, now_s: float) -> bool:
        """Return whether the pause after the last failure is over."""
        return boot != self.boot or now_s >= self.next_s


def holder_pause_s(num_failures: int) -> float:
    """Return the pause before the next holder job in seconds: 1, 2, 4 and so on up to `MAX_PAUSE_S`; 0 after none."""
    return 0.0 if num_failures == 0 else min(MAX_PAUSE_S, 2.0 ** (min(num_failures, 16) - 1))


def read_record(file: Path) -> HolderRecord:
    """Return the record of `file`; the first time one with a new key, which is stored."""
    try:
        return HolderRecord.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        record = HolderRecord(key=uuid.uuid4().hex)
        write_record(file, record)
        return record


def write_record(file: Path, record: HolderRecord) -> None:
    """Store a record."""
    write_atomically(file, record.model_dump_json())
