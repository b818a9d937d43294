"""Owners' records beside the ledger: what each record says, and the cause of each difference."""

from __future__ import annotations

import json
from datetime import UTC
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import FileError
from isthmus.core.records.card_record import RecordedHold, allocation_sizes, parse_card_lines
from isthmus.core.records.compare_records import ComparedPart, compare_records
from isthmus.core.records.held_interval import HeldInterval, RecordedPart, Restart
from isthmus.core.records.kubernetes_records import parse_kubernetes_records
from isthmus.core.records.read_records import RecordFiles, read_records
from isthmus.core.records.slurm_records import parse_slurm_records, parse_slurmctld_log

PART, HOLD = RecordedPart("a", 1), "0123456789abcdef0123456789abcdef"
HOLDS = {HOLD: RecordedHold(part=PART, units=((2, 3), (1, 1)))}
BASE_MS = 1_796_083_200_000  # 2026-12-01T00:00:00Z
WINDOW = (BASE_MS, BASE_MS + 31 * 86_400_000)
S = 1000


def held(begin_s: float, end_s: float | None, chips: int = 4, part: RecordedPart = PART) -> HeldInterval:
    """`chips` held from and to seconds after the begin of the month."""
    end_ms = None if end_s is None else BASE_MS + round(end_s * S)
    return HeldInterval(part=part, chips=chips, begin_ms=BASE_MS + round(begin_s * S), end_ms=end_ms)


def causes(
    ours: list[HeldInterval], theirs: list[HeldInterval], *restarts_s: float, resolution_s: float = 1
) -> list[str]:
    """The causes of the differences, in their order."""
    return [
        one.cause for part in compared(ours, theirs, *restarts_s, resolution_s=resolution_s) for one in part.differences
    ]


def compared(
    ours: list[HeldInterval], theirs: list[HeldInterval], *restarts_s: float, resolution_s: float = 1
) -> tuple[ComparedPart, ...]:
    """The compared parts."""
    restarts = [Restart(BASE_MS + round(at_s * S), "slurmctld") for at_s in restarts_s]
    return compare_records(ours, theirs, restarts, WINDOW, resolution_ms=round(resolution_s * S))[0]


def test_phases_and_prices_cut_no_interval() -> None:
    """The ledger cuts where a phase or price changes; equal chips that meet are one interval."""
    ours = [held(10, 20), held(20, 50), held(50, 60)]
    (part,) = compared(ours, [held(10, 60)])
    assert (part.differences, [(one.chips, one.end_ms) for one in part.ours]) == ((), [(4, BASE_MS + 60 * S)])


@pytest.mark.parametrize(
    ("ours", "theirs", "restarts_s", "expected"),
    [
        ((10, 60), (10.4, 59.3), (), ["whole seconds", "whole seconds"]),
        ((13, 60), (10, 60), (), ["queue end"]),
        ((10, 60), (10, 63), (), ["late release"]),
        ((10, 63), (10, 60), (), ["late release"]),
        ((10, 60), (10, 400), (), ["late release"]),
        ((10, 60), (10, 4000), (), ["unknown"]),
        ((10, 60), (130, 181), (), ["clock skew", "clock skew"]),
        ((10, 600), (10, 300), (), ["unknown"]),
        ((10, 600), (10, 300), (300.5,), ["killed daemon"]),
        ((10, 600), (300, 600), (), ["unknown"]),
        ((300, 600), (10, 600), (299,), ["killed daemon"]),
    ],
)  # fmt: skip
def test_a_difference_has_its_cause(
    ours: tuple[float, float], theirs: tuple[float, float], restarts_s: tuple[float, ...], expected: list[str]
) -> None:
    """By its place, its length, and the restarts of daemons near it."""
    assert causes([held(*ours)], [held(*theirs)], *restarts_s) == expected


def test_what_only_one_side_has_is_unknown_unless_it_is_short_or_a_daemon_was_killed() -> None:
    """A part that the record lacks, and one that the ledger lacks."""
    assert causes([held(10, 60)], []) == ["unknown"]
    assert causes([held(10, 60)], [], 30) == ["killed daemon"]
    assert causes([], [held(10, 60)]) == ["unknown"]
    assert causes([], [held(10, 15)]) == ["queue end"]
    assert causes([held(10, 10.6)], [held(10, 10)]) == ["whole seconds"]


def test_more_chips_in_one_account_are_a_difference() -> None:
    """Not only times count."""
    (part,) = compared([held(10, 60, 4)], [held(10, 60, 3)])
    assert [(one.ours, one.theirs, one.cause, one.chip_ms) for one in part.differences] == [(4, 3, "unknown", 50 * S)]


def test_what_is_still_held_is_not_compared() -> None:
    """The ledger books an interval when it ends."""
    parts, still = compare_records([], [held(10, None)], (), WINDOW, resolution_ms=S)
    assert (parts, [one.part for one in still]) == ((), [PART])


spans = st.lists(st.tuples(st.integers(0, 500), st.integers(1, 100), st.integers(1, 8)), max_size=6)


@given(spans, spans)
def test_differences_account_for_all_that_differs(
    ours: list[tuple[int, int, int]], theirs: list[tuple[int, int, int]]
) -> None:
    """The differences of a part sum to the difference of both accounts."""
    mine, other = ([held(at, at + long, chips) for at, long, chips in one] for one in (ours, theirs))
    for part in compared(mine, other):
        assert sum(one.chip_ms for one in part.differences) == part.ours_chip_ms - part.theirs_chip_ms


def card_lines(*lines: dict[str, object]) -> list[str]:
    """Lines of a record of cards."""
    return [json.dumps(line) + "\n" for line in lines]


def test_the_record_of_cards_gives_intervals_restarts_and_holds() -> None:
    """A `held` line replaces the one before; a line that was cut off at the end is passed over."""
    lines = card_lines(
        {"at_s": 1.0, "event": "started"},
        {"at_s": 2.0, "event": "held", "job": "a", "attempt": 1, "hold": HOLD, "cards": ["g/0/0", "g/0/1"],
         "ranks": [["g", 1], ["g", 1]]},
        {"at_s": 5.0, "event": "held", "job": "a", "attempt": 1, "hold": HOLD, "cards": ["g/0/0"], "ranks": [["g", 1]]},
        {"at_s": 9.5, "event": "released", "job": "a", "attempt": 1},
    )  # fmt: skip
    found = parse_card_lines([*lines, '{"at_s": 10, "ev'], "cards")
    assert [(one.chips, one.begin_ms, one.end_ms) for one in found.intervals] == [(2, 2000, 5000), (1, 5000, 9500)]
    assert (found.restarts, found.holds[HOLD].part) == ([Restart(1000, "agent")], PART)
    with pytest.raises(FileError, match="cards:5: "):
        parse_card_lines([*lines, '{"at_s": 10, "ev\n', *lines], "cards")


def test_equal_ranks_share_an_allocation() -> None:
    """As the agent asks for them: cards of a rank, and how many ranks."""
    assert allocation_sizes([("g", 2), ("h", 1), ("g", 2), ("g", 2)]) == ((2, 3), (1, 1))


COMPLETED = (
    "JobId={id} UserId=iso(7) GroupId=iso(7) Name={name} JobState={state} Partition=normal TimeLimit=UNLIMITED "
    "StartTime={begin} EndTime={end} NodeList=east1 NodeCnt=1 ProcCnt=1 WorkDir=/ ReservationName= Tres=cpu=1 \n"
)
SHOWN = (
    "JobId={id} JobName={name} UserId=iso(7) GroupId=iso(7) MCS_label=N/A JobState={state} Reason=None "
    "SubmitTime=2026-12-01T00:00:00 StartTime={begin} EndTime={end} Deadline=N/A \n"
)
TABLE = "{id}|{name}|iso|{state}|{begin}|{end}\n"
HEADER = {COMPLETED: [], SHOWN: [], TABLE: ["JobIDRaw|JobName|User|State|Start|End\n"]}


def slurm_line(form: str, name: str, state: str = "CANCELLED", end: str = "2026-12-01T00:01:00", **more: str) -> str:
    """A line of one of the forms."""
    return form.format(id="7", name=name, state=state, begin="2026-12-01T00:00:10", end=end, **more)


@pytest.mark.parametrize("form", [COMPLETED, SHOWN, TABLE])
def test_slurm_gives_the_chips_of_each_allocation_and_passes_over_other_jobs(form: str) -> None:
    """The number in the name says which ranks it has; names of other jobs are any text."""
    forged = f"x {SHOWN}".replace("\n", "")
    lines = [
        *HEADER[form],
        slurm_line(form, f"isthmus-{HOLD}-0"),
        slurm_line(form, "train big|model"),
        slurm_line(form, forged),
        slurm_line(form, f"isthmus-{HOLD}-1", state="RUNNING", end="Unknown"),
    ]
    found = parse_slurm_records(lines, "acct", HOLDS, UTC)
    assert [(one.part, one.chips, one.begin_ms - BASE_MS, one.end_ms) for one in found] == [
        (PART, 6, 10 * S, BASE_MS + 60 * S), (PART, 1, 10 * S, None)
    ]  # fmt: skip
    assert parse_slurm_records(lines, "acct", {}, UTC)[0].part == RecordedPart(f"hold {HOLD}", 0)


@pytest.mark.parametrize("form", [COMPLETED, SHOWN, TABLE])
def test_an_own_line_of_slurm_that_cannot_be_read_is_named(form: str) -> None:
    """With file and line, never passed over."""
    good, bad = slurm_line(form, f"isthmus-{HOLD}-0"), slurm_line(form, f"isthmus-{HOLD}-1", end="yesterday")
    with pytest.raises(FileError, match=rf"acct:{2 + len(HEADER[form])}: .*'yesterday'"):
        parse_slurm_records([*HEADER[form], good, bad], "acct", HOLDS, UTC)
    early = slurm_line(form, f"isthmus-{HOLD}-0", end="2026-12-01T00:00:01")
    with pytest.raises(FileError, match="before its begin"):
        parse_slurm_records([*HEADER[form], early], "acct", HOLDS, UTC)
    other = slurm_line(form, f"isthmus-{HOLD}-1").replace("iso(7) ", "eve(9) ").replace("|iso|", "|eve|")
    with pytest.raises(FileError, match="'iso' and 'eve'"):
        parse_slurm_records([*HEADER[form], good, other], "acct", HOLDS, UTC)


def test_the_log_of_slurmctld_has_its_starts() -> None:
    """Other lines are passed over."""
    log = ["[2026-12-01T00:00:05.250] slurmctld version 22.05.8 started on cluster east\n", "[x] error: slurmctld\n"]
    assert parse_slurmctld_log(log, "log", UTC) == [Restart(BASE_MS + 5250, "slurmctld")]


def event(name: str, reason: str, at: str) -> dict[str, object]:
    """An event of a pod."""
    return {"kind": "Event", "involvedObject": {"kind": "Pod", "name": name}, "reason": reason, "lastTimestamp": at}


def test_kubernetes_gives_pods_from_their_scheduling_to_the_end_of_their_containers() -> None:
    """A pod's own status is more exact than its events, which stand in for a pod that is gone."""
    gone, kept = f"isthmus-{HOLD}-0-0-x1y2z", f"isthmus-{HOLD}-1-0-abcde"
    pod = {
        "kind": "Pod", "metadata": {"name": kept},
        "status": {
            "phase": "Succeeded",
            "conditions": [{"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-12-01T00:00:10Z"}],
            "containerStatuses": [{"state": {"terminated": {"finishedAt": "2026-12-01T00:01:00Z"}}}],
        },
    }  # fmt: skip
    items = [
        event(gone, "Scheduled", "2026-12-01T00:00:10Z"), event(gone, "Killing", "2026-12-01T00:00:40Z"),
        event(kept, "Killing", "2026-12-01T00:00:50Z"), pod, event("web-1", "Scheduled", "never"),
    ]  # fmt: skip
    found = parse_kubernetes_records(json.dumps({"kind": "List", "items": items}).encode(), "k", HOLDS)
    assert [(one.part, one.chips, (one.end_ms or 0) - BASE_MS) for one in found] == [
        (PART, 2, 40 * S),
        (PART, 1, 60 * S),
    ]


def test_an_item_of_kubernetes_that_cannot_be_read_is_named() -> None:
    """With its place in the list; a text that is no JSON with its line."""
    bad = event(f"isthmus-{HOLD}-0-0-x", "Scheduled", "never")
    with pytest.raises(FileError, match=r"items\.0: ValueError"):
        parse_kubernetes_records(json.dumps({"kind": "List", "items": [bad]}).encode(), "k", HOLDS)
    with pytest.raises(FileError, match="k:2: "):
        parse_kubernetes_records(b'{\n"kind": ', "k", HOLDS)


def test_a_folder_of_cards_is_read_month_by_month(tmp_path: Path) -> None:
    """What was open at the end of a month is open again at the begin of the next file."""
    line = {"event": "held", "job": "a", "attempt": 1, "cards": ["g/0/0"]}
    (tmp_path / "2026-11.jsonl").write_text("".join(card_lines({**line, "at_s": BASE_MS / S - 50})))
    december = card_lines(
        {**line, "at_s": BASE_MS / S}, {"at_s": BASE_MS / S + 9, "event": "released", "job": "a", "attempt": 1}
    )
    (tmp_path / "2026-12.jsonl").write_text("".join(december))
    found = read_records(RecordFiles(cards=tmp_path))
    assert [(one.begin_ms - BASE_MS, (one.end_ms or 0) - BASE_MS) for one in found.intervals] == [
        (-50 * S, 0),
        (0, 9 * S),
    ]
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match="has no record of cards"):
        read_records(RecordFiles(cards=tmp_path / "empty"))
