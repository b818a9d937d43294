"""Rules of copies at peers: kept on another machine, whole or not at all, and returned to their owner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.comm.transport.memory_transport import MemoryTransport, memory_transports
from isthmus.train.checkpoint.memory_checkpoint import MemoryCheckpoint
from isthmus.train.checkpoint.snapshot_holders import choose_snapshot_holders
from isthmus.train.checkpoint.snapshot_replicator import SnapshotReplicator, receive_slot, send_slot

HOLDERS = (1, 2, 0)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xyz")), min_size=1, max_size=9), st.booleans())
def test_a_holder_is_on_another_machine(places: list[tuple[str, str]], across: bool) -> None:
    """Of one's own cluster where that has another machine, else elsewhere where that is allowed."""
    holders = choose_snapshot_holders(places, across_clusters=across)
    for rank, holder in enumerate(holders):
        others = [one for one in places if one != places[rank]]
        near = [one for one in others if one[0] == places[rank][0]]
        if holder is None:
            assert not (others if across else near)
            continue
        assert places[holder] != places[rank]
        assert places[holder][0] == places[rank][0] or (across and not near)


def test_holders_share_the_work() -> None:
    """Two machines of two ranks each: every rank holds one copy."""
    places = [("a", "x"), ("a", "x"), ("a", "y"), ("a", "y")]
    assert sorted(choose_snapshot_holders(places, across_clusters=False)) == [0, 1, 2, 3]  # type: ignore[type-var]


@pytest.fixture
def transports() -> Iterator[list[MemoryTransport]]:
    """Three ranks."""
    found = memory_transports(3)
    yield found
    for one in found:
        one.close()


class Altered:
    """A transport that sends what `change` returns for a message's label and payload."""

    def __init__(self, transport: MemoryTransport, change: Callable[[str, memoryview], memoryview]) -> None:
        self.rank, self.receive, self.close = transport.rank, transport.receive, transport.close
        self.transport, self.change = transport, change

    def send(self, peer: int, tag: int, label: str, payload: memoryview) -> Future[None]:
        return self.transport.send(peer, tag, label, self.change(label, payload))


class Ranks:
    """Three ranks with memory, each holding the copy of the one before."""

    def __init__(self, transports: Sequence[Any], folder: Path, **options: Any) -> None:
        self.memory = [MemoryCheckpoint(f"of-{rank}", rank, folder) for rank in range(3)]
        self.copies = [
            SnapshotReplicator(one, memory, HOLDERS, **options)
            for one, memory in zip(transports, self.memory, strict=True)
        ]

    def take(self, step: int) -> None:
        """Let every rank take a snapshot and send it, until all have arrived."""
        for rank, (memory, copies) in enumerate(zip(self.memory, self.copies, strict=True)):
            state = {"weight/a": torch.full((300_000,), float(100 * rank + step))}
            memory.begin_snapshot(step, step, state)
            copies.send(step)
        for copies in self.copies:
            copies.wait()

    def clear(self) -> None:
        for copies in self.copies:
            copies.close()
            for held in copies.held_copies.values():
                held.clear()
        for one in self.memory:
            one.clear()


@contextmanager
def started(transports: Sequence[Any], folder: Path, **options: Any) -> Iterator[Ranks]:
    """Three ranks that receive copies; at the end no memory is left in `folder`."""
    one = Ranks(transports, folder, **options)
    for copies in one.copies:
        copies.start()
    yield one
    one.clear()
    assert list(folder.iterdir()) == []


@pytest.fixture
def ranks(transports: list[MemoryTransport], tmp_path: Path) -> Iterator[Ranks]:
    with started(transports, tmp_path) as one:
        yield one


def test_the_last_two_snapshots_are_at_the_peer(ranks: Ranks, tmp_path: Path) -> None:
    """A copy replaces the older of two; a successor of the holder finds both."""
    for step in (1, 2, 3):
        ranks.take(step)
        assert not any(copies.is_sending for copies in ranks.copies)
    assert [list(copies.held_copies) for copies in ranks.copies] == [[2], [0], [1]]
    held = MemoryCheckpoint("of-1", 0, tmp_path)
    assert held.steps() == (2, 3)
    assert held.load(3).tensors["weight/a"][0] == 3.0


def test_a_copy_is_given_back(ranks: Ranks, transports: list[MemoryTransport], tmp_path: Path) -> None:
    """A rank that begins elsewhere, with nothing, gets its snapshot from its holder."""
    ranks.take(1)
    ranks.take(2)
    fresh = MemoryCheckpoint("job-1", 0, tmp_path / "elsewhere")
    slot = ranks.copies[1].held_copies[0].slot(2)
    assert slot is not None
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send_slot, transports[1], 0, slot, returning=True)
        assert receive_slot(transports[0], 1, fresh, returning=True)
        assert sent.result(20)
    assert fresh.steps() == (2,)
    assert fresh.load(2).tensors["weight/a"][0] == 2.0
    fresh.clear()
    (tmp_path / "elsewhere").rmdir()


def exchanged(transports: Sequence[Any], memory: MemoryCheckpoint, held: MemoryCheckpoint) -> bool:
    """Send the newest snapshot from rank 0 to rank 1; return whether its copy is valid."""
    slot = memory.slot(memory.steps()[-1])
    assert slot is not None
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(receive_slot, transports[1], 0, held)
        sent = send_slot(transports[0], 1, slot)
        assert received.result(20) == sent
    return sent


@pytest.mark.parametrize("damage", ["on the way", "at the source"])
def test_a_damaged_copy_does_not_count(transports: list[MemoryTransport], tmp_path: Path, damage: str) -> None:
    """What does not arrive as it was taken is not held, and both sides know; the next one is."""
    memory, held = (MemoryCheckpoint(name, 0, tmp_path) for name in ("job-1", "job-1-held"))
    memory.begin_snapshot(1, 1, {"weight/a": torch.ones(1000)}).result()

    def flip(label: str, payload: memoryview) -> memoryview:
        data = bytearray(payload)
        data[-1] ^= 1 if label == "piece" else 0
        return memoryview(data)

    sender: MemoryTransport | Altered = transports[0]
    if damage == "on the way":
        sender = Altered(transports[0], flip)
    else:
        with (tmp_path / "isthmus-job-1" / "rank-00000.0.data").open("r+b") as file:
            file.write(b"damage")
    assert not exchanged([sender, transports[1]], memory, held)
    assert held.steps() == ()
    memory.begin_snapshot(2, 2, {"weight/a": torch.ones(1000)}).result()
    assert exchanged(transports, memory, held)
    assert held.steps() == (2,)
    for one in (memory, held):
        one.clear()


def test_a_holder_without_room_says_so(
    transports: list[MemoryTransport], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sender goes on without a copy; the holder's log says why."""
    memory, held = MemoryCheckpoint("job-1", 0, tmp_path), MemoryCheckpoint("held", 0, tmp_path)
    memory.begin_snapshot(1, 1, {"weight/a": torch.ones(1000)}).result()
    (tmp_path / "isthmus-held").write_text("in the way")
    assert not exchanged(transports, memory, held)
    assert "refused a snapshot copy of rank 0" in capsys.readouterr().out
    memory.clear()


def test_training_traffic_waits_for_one_piece_at_most(transports: list[MemoryTransport], tmp_path: Path) -> None:
    """A copy is never handed over in more than a piece at a time."""
    under_way: list[int] = []

    def watch(_: str, payload: memoryview) -> memoryview:
        under_way.append(len(payload))
        return payload

    with started([Altered(transports[0], watch), *transports[1:]], tmp_path, chunk_bytes=1000) as ranks:
        ranks.take(1)
    assert max(under_way) <= 1000
    assert len(under_way) > 1000


def test_a_missing_copy_is_told_once(ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not at each step: both logs have it when it begins, and when it begins again."""
    places = [tmp_path / f"isthmus-of-1/rank-00000.{number}.data" for number in (0, 1)]
    told = []
    for step in range(1, 7):
        if step in (1, 5):
            for place in places:
                place.unlink(missing_ok=True)
                place.mkdir(parents=True)
        if step == 4:
            for place in places:
                place.rmdir()
        ranks.take(step)
        said = capsys.readouterr().out
        told.append(("refused a snapshot copy of rank 0" in said, "rank 1 holds no copy" in said))
    for place in places:
        place.rmdir()
    yes, no = (True, True), (False, False)
    assert told == [yes, no, no, no, yes, no]
