"""Rules of the events in a report: the newest of a part, numbered by their place, whatever a worker wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isthmus.agent.service.worker_event_tails import TAIL_BYTES, WorkerEventTails
from isthmus.core.messages.agent_messages import MAX_EVENT_CHARS, MAX_PART_EVENTS, MAX_REFUSED_EVENTS


def line(rank: int, time_s: float, kind: str = "resumed", **more: Any) -> bytes:
    return json.dumps({"time_s": time_s, "rank": rank, "kind": kind, "detail": "", **more}).encode() + b"\n"


def folders(path: Path, *contents: bytes) -> list[Path]:
    found = []
    for rank, content in enumerate(contents):
        found.append(path / f"rank-{rank}")
        found[-1].mkdir(parents=True)
        (found[-1] / "events.jsonl").write_bytes(content)
    return found


def test_events_of_all_ranks_are_reported_in_the_order_of_time(tmp_path: Path) -> None:
    """Each has its offset in its file as number, so that a later report repeats the same numbers."""
    first = line(0, 1.0)
    ranks = folders(tmp_path, first + line(0, 3.0, step=5), line(1, 2.0, "died"))
    tails = WorkerEventTails()
    found = tails.newest(ranks)
    assert [(one.rank, one.number, one.kind) for one in found] == [
        (0, 0, "resumed"), (1, 0, "died"), (0, len(first), "resumed"),
    ]  # fmt: skip
    with (ranks[1] / "events.jsonl").open("ab") as file:
        file.write(line(1, 4.0, "saved", step=9))
    assert [one.kind for one in tails.newest(ranks)][-1] == "saved"


@pytest.mark.attack
def test_a_stranger_at_the_ranks_hides_no_other_event(tmp_path: Path) -> None:
    """Each rank of many says once a minute that it has turned callers away: a few of these are reported."""
    refusals = [b"".join(line(rank, 100.0 + n, "refused") for n in range(30)) for rank in range(8)]
    ranks = folders(tmp_path, line(0, 1.0, "died") + refusals[0], *refusals[1:])
    found = WorkerEventTails().newest(ranks)
    assert [one.kind for one in found] == ["died", *["refused"] * MAX_REFUSED_EVENTS]
    assert {one.time_s for one in found[1:]} == {129.0}


def test_hostile_files_cost_nothing_but_their_own_events(tmp_path: Path) -> None:
    """Broken lines, half lines, unknown kinds, endless files and long texts: the report stays small and valid."""
    noise = b"{broken\n" + line(0, 1.0, "cut") + b"\xff\xfe\n" + line(0, 2.0, "nonsense")
    many = b"".join(line(0, float(n)) for n in range(5000))
    assert len(many) > TAIL_BYTES
    (folder,) = folders(tmp_path, noise + many + line(0, 9e9, "died", detail="x" * 10_000) + line(0, 1.0)[:-9])
    found = WorkerEventTails().newest([folder])
    assert len(found) == MAX_PART_EVENTS
    assert (found[-1].kind, len(found[-1].detail)) == ("died", MAX_EVENT_CHARS)
    assert WorkerEventTails().newest([tmp_path / "missing"]) == ()
