"""Job ids: the job's name and 128 random bits. People get a short prefix, programs the whole id."""

from __future__ import annotations

import re
from collections.abc import Iterable

RANDOM_BYTES = 16
"""Random bytes of an id; earlier versions used 4, and their ids stay valid."""
SHORT_DIGITS = 8
"""Hexadecimal digits of a short prefix where these are unique."""
_MAX_NAME_CHARACTERS = 30
"""Characters of the job's name in its id: an id has at most 63 in total."""

_WHOLE_ID = re.compile(rf"(?P<stem>.+-)[0-9a-f]{{{2 * RANDOM_BYTES}}}")


def make_job_id(name: str, drawn: bytes) -> str:
    """Return the id of a new job with this name; `drawn` are `RANDOM_BYTES` random bytes."""
    return f"{name[:_MAX_NAME_CHARACTERS]}-{drawn.hex()}"


def short_job_id(job_id: str) -> str:
    """Return the prefix of an id with `SHORT_DIGITS` random digits; an id of another form stays whole."""
    found = _WHOLE_ID.fullmatch(job_id)
    return job_id[: found.end("stem") + SHORT_DIGITS] if found else job_id


def short_job_ids(job_ids: Iterable[str]) -> dict[str, str]:
    """Return for each id its shortest unique prefix with at least `SHORT_DIGITS` digits."""
    ids = sorted(set(job_ids))
    shared = [0, *map(_shared_characters, ids, ids[1:]), 0]
    return {
        one: one if (short := short_job_id(one)) == one else one[: max(len(short), before + 1, after + 1)]
        for one, before, after in zip(ids, shared, shared[1:], strict=False)
    }


def _shared_characters(one: str, other: str) -> int:
    """Return the length of the longest common prefix."""
    length = 0
    for mine, its in zip(one, other, strict=False):
        if mine != its:
            break
        length += 1
    return length
