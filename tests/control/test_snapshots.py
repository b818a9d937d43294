"""Snapshots: a start behind one has the very state of a fold from the beginning, or passes it over."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.service.control_service import ControlService
from isthmus.control.service.coordinator_actor import ActorRequest, AppliedEvent, CoordinatorActor
from isthmus.control.state.coordinator_config import CoordinatorConfig
from isthmus.control.state.events import AgentReported, Event, JobCancelled, JobSubmitted, NoticeDue
from isthmus.control.store.snapshot_file import SnapshotFile, code_fingerprint
from isthmus.control.store.store_interface import MemoryStore
from isthmus.core.errors import UnavailableError
from isthmus.core.views.access_views import AuditRecord
from tests.control.serving import EAST, POOL, WEST, plan_across, report, submission


class Life:
    """One life of an actor on a store, with the snapshots of a folder; `told` are the events it observed."""

    def __init__(
        self, store: MemoryStore, folder: Path, rules: CoordinatorConfig | None = None, code: str | None = None
    ) -> None:
        self.told: list[int] = []
        self.resumed_at = 0
        self.actor = CoordinatorActor(
            store, self._observe, rules, snapshot_file=SnapshotFile(folder, code), on_snapshot_loaded=self._resume
        )

    def _observe(self, folded: AppliedEvent) -> None:
        self.told.append(folded.number)

    def _resume(self, number: int, _coordinator: Coordinator) -> None:
        self.resumed_at = number

    def submit(self, name: str) -> None:
        event = JobSubmitted(now_s=1.0, job_id=name, user="ann", submission=submission(name, name=name))
        self.actor.execute([ActorRequest(lambda _: None, lambda _: event)])[0].value()

    def views(self) -> object:
        return self.actor.query(
            lambda c: (c.list_jobs(), c.pool_view(), c.orders("east"), c.epoch, c.job_id_of_key("ann", "a"))
        )


@pytest.fixture
def store() -> MemoryStore:
    """A log with two sites and two jobs."""
    store = MemoryStore()
    store.append([AgentReported.from_report(report(site), 0.5) for site in (EAST, WEST)])
    return store


def test_a_start_folds_only_what_follows_and_has_the_same_state(store: MemoryStore, tmp_path: Path) -> None:
    """The script: 1. jobs; 2. a snapshot; 3. more jobs; 4. a new life observes the latter only."""
    first = Life(store, tmp_path)
    first.submit("a")
    first.submit("b")
    assert first.actor.save_snapshot() == 4
    first.submit("c")
    again = Life(store, tmp_path)
    assert (again.resumed_at, again.told) == (4, [5])
    assert again.views() == first.views() == Life(store, tmp_path / "none").views()
    again.submit("d")
    assert [number for number, _ in store.events(5)] == [6]


def test_a_snapshot_of_another_log_code_or_rules_is_passed_over(store: MemoryStore, tmp_path: Path) -> None:
    """It is a cache: whatever it does not fit, the log is folded whole."""
    first = Life(store, tmp_path)
    first.submit("a")
    first.actor.save_snapshot()
    assert Life(store, tmp_path).resumed_at == 3
    other = MemoryStore()
    other.append([JobSubmitted(now_s=1, job_id=f"o{i}", user="u", submission=submission()) for i in range(5)])
    assert Life(other, tmp_path).told == [1, 2, 3, 4, 5]
    assert Life(MemoryStore(), tmp_path).resumed_at == 0
    assert Life(store, tmp_path, CoordinatorConfig(retry_s=9)).resumed_at == 0
    assert Life(store, tmp_path, code="newer").told == [1, 2, 3]


@pytest.mark.parametrize("damage", ["", "{}\n", "no json\n", "cut", "flipped"])
def test_a_damaged_snapshot_is_passed_over(store: MemoryStore, tmp_path: Path, damage: str) -> None:
    """Cut, overwritten or flipped: the state comes from the log."""
    first = Life(store, tmp_path)
    first.submit("a")
    first.actor.save_snapshot()
    file = SnapshotFile(tmp_path).path
    whole = file.read_bytes()
    assert file.stat().st_mode & 0o777 == 0o600
    changed = {"cut": whole[:-1], "flipped": whole[:-9] + b"x" + whole[-8:]}
    file.write_bytes(changed.get(damage, damage.encode()))
    again = Life(store, tmp_path)
    assert (again.resumed_at, again.told) == (0, [1, 2, 3])
    assert again.views() == first.views()


class Full(MemoryStore):
    """A store that is full while `full`."""

    full = False

    def append(
        self,
        events: Sequence[Event],
        expected_last: int | None = None,
        audit: Sequence[AuditRecord] = (),
        notices: Sequence[NoticeDue] = (),
    ) -> int:
        if self.full:
            raise UnavailableError("the disk is full")
        return super().append(events, expected_last, audit, notices)


def test_a_failed_append_folds_from_the_snapshot(tmp_path: Path) -> None:
    """Where the coordinator is discarded, the next begins behind the snapshot; no event is observed twice."""
    store = Full()
    store.append([AgentReported.from_report(report(site), 0.5) for site in (EAST, WEST)])
    life = Life(store, tmp_path)
    life.submit("a")
    life.actor.save_snapshot()
    store.full = True
    with pytest.raises(UnavailableError):
        life.submit("lost")
    store.full = False
    life.submit("b")
    assert life.told == [1, 2, 3, 4]
    assert life.views() == Life(store, tmp_path / "none").views()


def test_followers_and_meters_know_the_jobs_of_a_snapshot(tmp_path: Path) -> None:
    """A server that starts behind a snapshot streams and counts what one does that folds the whole log."""
    store = MemoryStore()
    first = ControlService(
        store, POOL, planner=plan_across, snapshot_file=SnapshotFile(tmp_path), snapshot_interval_events=1
    )
    asked = [first.submissions.submit_request(user, submission()) for user in ("ann", "bob")]
    kept, gone = (request.value() for request in first.execute(asked))
    first.tick()
    store.append([JobCancelled(now_s=2.0, job_id=gone.id)])
    again = ControlService(store, POOL, planner=plan_across, snapshot_file=SnapshotFile(tmp_path))
    assert [change.job_id for change in again.changes.changes_after(0, 9, "ann")] == [kept.id]
    assert sum(again.server_metrics.jobs_by_state().values()) == 2
    assert again.server_metrics.jobs_by_state()["cancelled"] == 1
    for shell in (first, again):
        shell.close()


@pytest.mark.parametrize("interval", [20, 1000])
def test_a_server_that_has_replayed_its_whole_log_saves_a_snapshot_soon(tmp_path: Path, interval: int) -> None:
    """After an upgrade no snapshot fits: one is saved at the first tick, not after as many events again.

    Otherwise each start of a server that does not live long replays the whole log. A short log needs none.
    """
    store = MemoryStore()
    for number in range(20):
        name = f"j{number}"
        store.append([JobSubmitted(now_s=1.0, job_id=name, user="ann", submission=submission(name, name=name))])

    def start() -> ControlService:
        snapshots = SnapshotFile(tmp_path)
        return ControlService(
            store, POOL, planner=plan_across, snapshot_file=snapshots, snapshot_interval_events=interval
        )

    server = start()
    server.tick()
    server.close()
    assert SnapshotFile(tmp_path).path.exists() == (interval == 20)
    saved = SnapshotFile(tmp_path).path.stat().st_mtime_ns if interval == 20 else 0
    server = start()
    server.tick()
    server.close()
    assert (SnapshotFile(tmp_path).path.stat().st_mtime_ns if interval == 20 else 0) == saved


def test_only_a_change_of_the_code_makes_a_snapshot_that_of_other_code(tmp_path: Path) -> None:
    """A process that imports a module for the first time adds bytecode: that is none, else the next start is slow."""
    code, data = tmp_path / "control" / "state.py", tmp_path / "core" / "chips.yaml"
    for file in (code, data):
        file.parent.mkdir()
        file.write_text("a")
    first = code_fingerprint(tmp_path)
    cache = tmp_path / "core" / "__pycache__"
    cache.mkdir()
    (cache / "state.cpython-311.pyc").write_bytes(b"a")
    code_fingerprint.cache_clear()
    assert code_fingerprint(tmp_path) == first
    for file in (code, data):
        file.write_text("b")
        code_fingerprint.cache_clear()
        assert code_fingerprint(tmp_path) != first
        file.write_text("a")
