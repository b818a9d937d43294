"""From workers' files to reports: every line once it is whole, every byte once, whatever is lost between."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.agent.service.telemetry_outbox import TelemetryBatch, TelemetryOutbox


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of rank 0 of job a, attempt 1."""
    folder = tmp_path / "a" / "1" / "rank-0"
    folder.mkdir(parents=True)
    return folder


def line(step: int) -> str:
    return json.dumps({"job": "a", "attempt": 1, "rank": 0, "step": step, "values": {"loss": 1.0}}) + "\n"


def text(batch: TelemetryBatch) -> str:
    return "".join(chunk.text for chunk in batch.logs)


def test_a_batch_is_sent_again_until_it_is_stored(tmp_path: Path, folder: Path) -> None:
    """The script: 1. collect; 2. the answer is lost; 3. collect gives the same; 4. stored; 5. nothing."""
    (folder / "metrics.jsonl").write_text(line(0))
    (folder / "log").write_text("hello\n")
    outbox = TelemetryOutbox(tmp_path)
    assert outbox.collect() == outbox.collect()
    batch = outbox.collect()
    assert ([one.step for one in batch.metrics], text(batch)) == ([0], "hello\n")
    outbox.acknowledge(batch)
    assert (outbox.collect().metrics, outbox.collect().logs) == ([], [])


def test_how_far_it_came_outlives_the_agent(tmp_path: Path, folder: Path) -> None:
    """The next agent resumes behind what the server acknowledged to this one."""
    log = folder / "log"
    log.write_text("one\n")
    first = TelemetryOutbox(tmp_path)
    first.acknowledge(first.collect())
    with log.open("a") as stream:
        stream.write("two\n")
    chunk = TelemetryOutbox(tmp_path).collect().logs[0]
    assert (chunk.offset, chunk.text) == (4, "two\n")


def test_half_a_line_waits_for_its_other_half(tmp_path: Path, folder: Path) -> None:
    """A metrics line counts once its newline is there, or once the worker has ended."""
    (folder / "metrics.jsonl").write_text(line(0) + line(1)[:-1])
    outbox = TelemetryOutbox(tmp_path)
    assert [one.step for one in outbox.collect().metrics] == [0]
    (folder / "exit").write_text("0\n")
    assert [one.step for one in outbox.collect().metrics] == [0, 1]


def test_a_line_that_is_no_metrics_is_passed_over(tmp_path: Path, folder: Path) -> None:
    """One broken line costs neither the lines behind it nor an endless repetition."""
    (folder / "metrics.jsonl").write_text("{broken\n" + line(1))
    outbox = TelemetryOutbox(tmp_path)
    batch = outbox.collect()
    assert [one.step for one in batch.metrics] == [1]
    outbox.acknowledge(batch)
    assert outbox.is_attempt_drained(folder.parent)


@given(data=st.binary(max_size=60), cuts=st.lists(st.integers(0, 60), max_size=5))
def test_offsets_count_bytes_whatever_the_bytes(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, cuts: list[int]
) -> None:
    """Read while it grows, anywhere cut: chunks join without gap or overlap, valid text arrives as it was."""
    folder = tmp_path_factory.mktemp("runs") / "a" / "1" / "rank-0"
    folder.mkdir(parents=True)
    outbox, chunks = TelemetryOutbox(folder.parents[2]), []
    for end in [*sorted(cuts), len(data)]:
        (folder / "log").write_bytes(data[:end])
        batch = outbox.collect()
        chunks += batch.logs
        outbox.acknowledge(batch)
    (folder / "exit").write_text("0\n")
    chunks += outbox.collect().logs
    offset = 0
    for chunk in chunks:
        assert chunk.offset == offset
        offset += len(chunk.text.encode())
    assert offset == len(data)
    try:
        assert "".join(chunk.text for chunk in chunks) == data.decode()
    except UnicodeDecodeError:
        assert "?" in "".join(chunk.text for chunk in chunks)


def test_a_report_is_bounded_and_the_rest_follows(tmp_path: Path, folder: Path) -> None:
    """A long log goes in several reports; `full` says that there is more."""
    (folder / "log").write_text("0123456789abcde")
    outbox = TelemetryOutbox(tmp_path, max_batch_bytes=10)
    batch = outbox.collect()
    assert (text(batch), batch.full) == ("0123456789", True)
    outbox.acknowledge(batch)
    assert not outbox.is_attempt_drained(folder.parent)
    batch = outbox.collect()
    assert (text(batch), batch.full) == ("abcde", False)
    outbox.acknowledge(batch)
    assert outbox.is_attempt_drained(folder.parent)


def test_a_character_is_not_cut_where_a_report_is_full(tmp_path: Path, folder: Path) -> None:
    """What an ended worker wrote arrives as it was, though a report ends within a character of it."""
    (folder / "log").write_text("abcü€")
    (folder / "exit").write_text("0\n")
    outbox, found = TelemetryOutbox(tmp_path, max_batch_bytes=4), ""
    while not outbox.is_attempt_drained(folder.parent):
        batch = outbox.collect()
        found += text(batch)
        outbox.acknowledge(batch)
    assert found == "abcü€"
