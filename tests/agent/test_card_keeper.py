"""The agent's own record of cards: durable, in the order of time, and true over restarts and months."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.agent.files.card_keeper import CardKeeper
from isthmus.core.errors import UnavailableError
from isthmus.core.records.card_record import parse_card_lines
from isthmus.core.records.read_records import RecordFiles, read_records
from isthmus.site import SitePart
from isthmus.site.parts import SiteWorker

DECEMBER_S = 1_796_083_200.0


class Clock:
    """A clock that a test sets."""

    now_s = DECEMBER_S - 100

    def __call__(self) -> float:
        return self.now_s


def part(job: str, state: str, *cards: str, attempt: int = 1) -> SitePart:
    """A part with a rank for each card."""
    workers = {at: SiteWorker(node_group="g", chips=1, devices=(card,)) for at, card in enumerate(cards)}
    made = SitePart(job=job, attempt=attempt, state=state, workers=workers)  # type: ignore[arg-type]
    made.hold = "granted"
    return made


@pytest.fixture
def clock() -> Clock:
    """The clock of the site."""
    return Clock()


def hold_of(one: SitePart) -> str:
    """The id of a hold."""
    return f"hold-{one.job}"


def spans(state: Path) -> list[tuple[str, int, float, float | None]]:
    """Job, chips, begin and end of each interval, in seconds after the begin of December."""
    found = read_records(RecordFiles(cards=state / "cards")).intervals
    return [
        (one.part.job, one.chips, one.begin_ms / 1000 - DECEMBER_S, one.end_ms and one.end_ms / 1000 - DECEMBER_S)
        for one in found
    ]


def test_cards_that_the_scheduler_has_not_granted_are_not_held(tmp_path: Path, clock: Clock) -> None:
    """A part that claims free cards has them once the scheduler says so."""
    keeper, claimed = CardKeeper(tmp_path, clock), part("a", "evicting", "g/0/0")
    claimed.hold = "asked"
    keeper.update([claimed], hold_of)
    clock.now_s += 20
    claimed.hold = "granted"
    keeper.update([claimed], hold_of)
    assert spans(tmp_path) == [("a", 1, -80.0, None)]


def test_a_restarted_agent_continues_its_record(tmp_path: Path, clock: Clock) -> None:
    """A part that is still there was held all the time; one that is gone ends when the agent is back."""
    keeper = CardKeeper(tmp_path, clock)
    keeper.update([part("a", "prepared", "g/0/0"), part("b", "running", "g/0/1", "g/0/2")], hold_of)
    clock.now_s += 50
    CardKeeper(tmp_path, clock).update([part("b", "stopping", "g/0/1", "g/0/2")], hold_of)
    lines = (tmp_path / "cards" / "2026-11.jsonl").read_text().splitlines(keepends=True)
    found = parse_card_lines(lines, "")
    assert [one.part.job for one in found.intervals] == ["a", "b"]
    assert (found.intervals[0].end_ms, found.intervals[1].end_ms) == (1000 * (DECEMBER_S - 50), None)
    assert (len(found.restarts), found.holds["hold-b"].units) == (2, ((1, 2),))
    assert len(lines) == 5  # two starts, two held, one released


def test_a_held_part_passes_from_month_to_month(tmp_path: Path, clock: Clock) -> None:
    """The file of a month is complete: what is held at its first moment stands at its head."""
    keeper = CardKeeper(tmp_path, clock)
    keeper.update([part("a", "running", "g/0/0")], hold_of)
    clock.now_s = DECEMBER_S + 500
    keeper.update([], hold_of)
    assert spans(tmp_path) == [("a", 1, -100.0, 0.0), ("a", 1, 0.0, 500.0)]


def test_a_card_is_of_one_part_at_a_time(tmp_path: Path, clock: Clock) -> None:
    """What victims still hold is theirs, and cards of local jobs are in no record."""
    keeper = CardKeeper(tmp_path, clock)
    local, victim = part("own", "running", "g/0/0", attempt=0), part("a", "stopping", "g/0/1")
    keeper.update([part("b", "evicting", "g/0/0", "g/0/1", "g/0/2"), victim, local], hold_of)
    clock.now_s += 10
    keeper.update([part("b", "prepared", "g/0/0", "g/0/1", "g/0/2")], hold_of)
    clock.now_s += 10
    keeper.update([], hold_of)
    lines = (tmp_path / "cards" / "2026-11.jsonl").read_text().splitlines(keepends=True)
    held = sorted((one.part.job, one.chips, one.end_ms) for one in parse_card_lines(lines, "").intervals)
    ends = [1000 * (DECEMBER_S - 100 + after) for after in (10, 10, 20)]
    assert held == [("a", 1, ends[0]), ("b", 1, ends[1]), ("b", 3, ends[2])]


def test_a_line_that_was_cut_off_is_ended(tmp_path: Path, clock: Clock) -> None:
    """An agent that was killed while it wrote leaves no line that the next one cannot read."""
    CardKeeper(tmp_path, clock).update([part("a", "running", "g/0/0")], hold_of)
    file = tmp_path / "cards" / "2026-11.jsonl"
    file.write_text(file.read_text() + '{"at_s": 17')
    CardKeeper(tmp_path, clock).update([], hold_of)
    assert [one.part.job for one in parse_card_lines(file.read_text().splitlines(keepends=True), "").intervals] == ["a"]


def test_a_record_that_cannot_be_written_is_an_error_and_is_made_up_for(tmp_path: Path, clock: Clock) -> None:
    """The agent defers what it would do next, as it does without its table."""
    blocked = tmp_path / "cards"
    blocked.write_text("")
    keeper = CardKeeper(tmp_path, clock)
    with pytest.raises(UnavailableError):
        keeper.update([part("a", "running", "g/0/0")], hold_of)
    blocked.unlink()
    keeper.update([part("a", "running", "g/0/0")], hold_of)
    assert (tmp_path / "cards" / "2026-11.jsonl").read_text().count('"held"') == 1
