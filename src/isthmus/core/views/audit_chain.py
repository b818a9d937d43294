"""The hash chain of the audit log: each line carries SHA-256 over the hash before, its number and its fields.

The first hash follows from the store's identity. A changed, missing or swapped line breaks the chain at its place
(Haber and Stornetta 1991); a line cut off at the end is missed by an end that was noted before. Lines older than the
retention leave at the beginning, and a later line, `PRUNED`, names the last of them with its hash.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from isthmus.core.views.access_views import AuditRecord

PRUNED = "audit-pruned"
"""The act of a line that names the last removed line: `subject` is its number, `detail` its hash."""
MAX_PROBLEMS = 20
"""Problems that a report lists; the rest is counted."""
_CHAINED_FIELDS = ("number", "at_s", "action", "actor", "role", "token", "address", "subject", "detail")


class AuditEnd(NamedTuple):
    """The number and the hash of a line: the end of the audit log up to it. Number 0: before the first line."""

    number: int
    digest: bytes


def audit_start(store_id: str) -> AuditEnd:
    """Return the end of the empty audit log of a store."""
    return AuditEnd(0, hashlib.sha256(f"isthmus audit log of store {store_id}".encode()).digest())


def line_end(line: AuditRecord) -> AuditEnd:
    """Return the end of the audit log at a stored line; a line without a valid hash has an empty one."""
    try:
        return AuditEnd(line.number, bytes.fromhex(line.hash))
    except ValueError:
        return AuditEnd(line.number, b"")


def next_line(end: AuditEnd, record: AuditRecord) -> AuditRecord:
    """Return a record as the line behind `end`, with its number and hash."""
    numbered = record.model_copy(update={"number": end.number + 1})
    return numbered.model_copy(update={"hash": line_digest(end.digest, numbered).hex()})


def line_digest(before: bytes, line: AuditRecord) -> bytes:
    """Return the hash of a line behind the one with hash `before`."""
    fields = [getattr(line, name) for name in _CHAINED_FIELDS]
    return hashlib.sha256(before + json.dumps(fields, separators=(",", ":")).encode()).digest()


def pruned_end(line: AuditRecord) -> AuditEnd | None:
    """Return the last removed line that a line names, None if it is no `PRUNED` line."""
    if line.action != PRUNED or line.role or line.actor != "server" or not line.subject.isdecimal():
        return None
    try:
        return AuditEnd(int(line.subject), bytes.fromhex(line.detail))
    except ValueError:
        return None


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """What `check_audit` found: the lines, the end of the sound part, and every problem."""

    store: str
    num_lines: int
    # First and last number that the log has; 0 in an empty one.
    first: int
    end: AuditEnd
    problems: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form that commands print."""
        last = {"last_line": self.end.number, "last_hash": self.end.digest.hex()}
        return {"store": self.store, "lines": self.num_lines, "first_line": self.first} | last | {
            "problems": self.problems
        }  # fmt: skip


def check_audit(store_id: str, lines: Iterable[AuditRecord], known: AuditEnd | None = None) -> AuditReport:
    """Verify the chain of all lines in order, and that the log contains the line `known`, noted before."""
    problems, num_lines, first, num_problems = list[str](), 0, None, 0
    pruned = list[AuditEnd]()
    end = sound = audit_start(store_id)
    found_known = known is None or known.number == 0
    for line in lines:
        num_lines += 1
        if first is None:
            first = line
        else:
            wrong = _problem_behind(end, line)
            num_problems += bool(wrong)
            problems += [wrong] if wrong and len(problems) < MAX_PROBLEMS else []
        end = line_end(line)
        sound = sound if num_problems else end
        found_known = found_known or end == known
        if (cut := pruned_end(line)) is not None:
            pruned.append(cut)
    if first is not None and (wrong := _problem_at_start(store_id, first, pruned)):
        problems.insert(0, wrong)
    if known is not None and not found_known and not any(cut.number >= known.number for cut in pruned):
        problems.append(f"line {known.number}, which was noted before, is missing or another one: lines were cut off")
    more = num_problems - MAX_PROBLEMS
    problems += [f"and {more} more"] if more > 0 else []
    return AuditReport(
        store=store_id, num_lines=num_lines, first=first.number if first else 0, end=sound, problems=tuple(problems)
    )


def _problem_behind(end: AuditEnd, line: AuditRecord) -> str:
    """Return what is wrong with a line behind `end`, "" if it follows."""
    if line.number <= end.number:
        return f"line {line.number} stands behind line {end.number}: lines were swapped"
    if line_digest(end.digest, line).hex() == line.hash:
        return ""
    if line.number > end.number + 1:
        return f"line {line.number} does not follow line {end.number}: lines are missing between them"
    return f"line {line.number} or the one before it was changed"


def _problem_at_start(store_id: str, first: AuditRecord, pruned: Iterable[AuditEnd]) -> str:
    """Return what is wrong with the first line: it begins the log, or follows the lines that a `PRUNED` line names."""
    begins = [audit_start(store_id), *(cut for cut in pruned if cut.number < first.number)]
    if any(line_digest(begin.digest, first).hex() == first.hash for begin in begins):
        return ""
    return f"line {first.number} begins neither this store's log nor follows removed lines: lines before it are missing"
