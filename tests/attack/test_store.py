"""Attacks on what a server keeps: its snapshot."""

from __future__ import annotations

import json
import pickle
import subprocess
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.service.coordinator_actor import CoordinatorActor
from isthmus.control.state.events import AgentReported, JobSubmitted
from isthmus.control.store.snapshot_file import SnapshotFile, serialize_state
from isthmus.control.store.store_interface import MemoryStore
from tests.control.serving import EAST, report, submission

pytestmark = pytest.mark.attack


class Popen:
    """An object whose pickle calls `subprocess.Popen`."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return subprocess.Popen, (["touch", str(self.marker)],)


@pytest.fixture
def store() -> MemoryStore:
    """A log with a site and two jobs."""
    store = MemoryStore()
    store.append([AgentReported.from_report(report(EAST), 0.5)])
    store.append([JobSubmitted(now_s=1, job_id=f"j{i}", user="u", submission=submission()) for i in range(2)])
    return store


def start(store: MemoryStore, folder: Path) -> tuple[int, list[int]]:
    """Start on the log with the snapshot of `folder`; return the snapshot's event and the events replayed."""
    resumed, replayed = [0], list[int]()
    CoordinatorActor(
        store,
        lambda event: replayed.append(event.number),
        snapshot_file=SnapshotFile(folder),
        on_snapshot_loaded=lambda number, _: resumed.append(number),
    )
    return resumed[-1], replayed


@pytest.mark.parametrize("dotted", [True, False])
def test_a_pickle_in_place_of_a_snapshot_runs_nothing(
    store: MemoryStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, dotted: bool
) -> None:
    """A valid head with a pickled body, also one that names a function behind a dot: ignored with a warning."""
    marker = tmp_path / "ran"
    body = pickle.dumps(Popen(marker), protocol=4)
    if dotted:  # the function as an attribute of a module of the package
        module, name = b"isthmus.control.service.planner_process", b"subprocess.Popen"
        body = body.replace(b"\x8c\nsubprocess", b"\x8c" + bytes([len(module)]) + module)
        body = body.replace(b"\x8c\x05Popen", b"\x8c" + bytes([len(name)]) + name)
        body = body[:3] + (len(body) - 11).to_bytes(8, "little") + body[11:]  # the length of the frame
    SnapshotFile(tmp_path).save(store, 3, body)
    assert start(store, tmp_path) == (0, [1, 2, 3])
    assert "ignoring snapshot" in caplog.text
    assert not marker.exists()


def lengthen(body: dict[str, Any]) -> None:
    body["state"]["jobs"][0][0] = 10**15


def mistype(body: dict[str, Any]) -> None:
    body["state"]["jobs"][1][1]["user"] = {"texts": [7], "at": [0, 0]}


def misplace(body: dict[str, Any]) -> None:
    body["state"]["jobs"][1][1]["user"] = {"texts": ["u"], "at": [0, 10**9]}


def rename(body: dict[str, Any]) -> None:
    body["state"]["__class__"] = "subprocess.Popen"


def misstate(body: dict[str, Any]) -> None:
    body["state"]["jobs"][1][1]["state"] = ["__reduce__", "running"]


def dangle(body: dict[str, Any]) -> None:
    body["parts_by_cluster"] = [[1], [["east"], [[1], [["j0"], [9]]]]]


@pytest.mark.parametrize("change", [lengthen, mistype, misplace, rename, misstate, dangle, dict.clear])
def test_a_crafted_body_is_ignored_in_bounded_memory(
    store: MemoryStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[dict[str, Any]], None]
) -> None:
    """Every value is checked against the schema; a length without as many items costs nothing."""
    coordinator = Coordinator.replay(event for _, event in store.events())
    body = json.loads(serialize_state(coordinator))
    SnapshotFile(tmp_path).save(store, 3, json.dumps([body]).encode()[1:-1])
    assert start(store, tmp_path) == (3, [])
    change(body)
    SnapshotFile(tmp_path).save(store, 3, json.dumps(body).encode())
    tracemalloc.start()
    try:
        assert start(store, tmp_path) == (0, [1, 2, 3])
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert "ignoring snapshot" in caplog.text


def test_nesting_without_end_is_ignored(store: MemoryStore, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A body of a million brackets is refused; the process goes on."""
    SnapshotFile(tmp_path).save(store, 3, b"[" * 1_000_000)
    assert start(store, tmp_path) == (0, [1, 2, 3])
    assert "ignoring snapshot" in caplog.text


def test_a_snapshot_of_an_earlier_version_is_ignored(store: MemoryStore, tmp_path: Path) -> None:
    """It was a pickle under the same name: the log is replayed, and the next snapshot takes its place."""
    SnapshotFile(tmp_path, code="earlier").save(store, 3, pickle.dumps({"state": 1}))
    assert start(store, tmp_path) == (0, [1, 2, 3])
