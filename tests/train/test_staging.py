"""Rules of the way through host memory: copies beside computing, nothing read before its copy ended."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from isthmus.core.errors import PeerError
from isthmus.train.communication.communicator import Communicator, TensorMessage
from isthmus.train.communication.host_staging import MAX_STAGED_RECEIVES, CudaCopyEngine, HostStaging
from isthmus.train.communication.pinned_memory import copy_tensors_to_host
from tests.train.late_copies import LateCopies
from tests.train.small_models import write_config
from tests.train.test_executor import losses, make_training

DEADLINE_S = 20.0


class Arriving:
    """A receive that is over once `arrived` is set, or fails."""

    under_way = (1.0, 2.0)

    def __init__(self, host: torch.Tensor, error: PeerError | None = None) -> None:
        self.host, self.error = host, error
        self.arrived = threading.Event()

    def wait(self) -> bool:
        assert self.arrived.wait(DEADLINE_S)
        if self.error:
            raise self.error
        self.host.fill_(7.0)
        return True


@pytest.mark.parametrize("schedule", ["1f1b", "overlapped", "zero_bubble"])
def test_staging_changes_no_bit(tmp_path: Path, schedule: str) -> None:
    """However late copies end: activations, gradients and a tied embedding give the same curve."""
    model, training = write_config(tmp_path, "llama-tied"), make_training(steps=3)
    straight = losses(model, [1, 2, 4], training, schedule)
    assert losses(model, [1, 2, 4], training, schedule, staging=HostStaging(LateCopies())) == straight


def test_a_landing_fills_its_target_once() -> None:
    """The target holds the message after the first wait; the second copies nothing over what came since."""
    target, works = torch.zeros(2, 3), list[Arriving]()

    def receive(host: torch.Tensor) -> Arriving:
        works.append(Arriving(host))
        return works[0]

    landing = HostStaging(LateCopies()).receive_to_device(target, receive, clock=lambda: 2.5)
    assert not landing.is_completed()
    works[0].arrived.set()
    assert landing.wait()
    assert landing.is_completed()
    assert target.eq(7).all()
    assert landing.under_way == (1.0, 2.5)
    target.zero_()
    assert landing.wait()
    assert target.eq(0).all()


def test_a_landing_that_fails_leaves_its_target() -> None:
    """A lost peer surfaces as what it is, at each wait, and nothing is copied."""
    target = torch.zeros(2)

    def receive(host: torch.Tensor) -> Arriving:
        work = Arriving(host, PeerError("gone"))
        work.arrived.set()
        return work

    landing = HostStaging(LateCopies()).receive_to_device(target, receive)
    for _ in range(2):
        with pytest.raises(PeerError, match="gone"):
            landing.wait()
    assert target.eq(0).all()


def test_any_receive_may_be_waited_for_first() -> None:
    """More receives than threads: the last one is had while all before it have not come, in any order."""
    staging, works = HostStaging(LateCopies()), list[Arriving]()

    def receive(host: torch.Tensor) -> Arriving:
        works.append(Arriving(host))
        return works[-1]

    targets = [torch.zeros(3) for _ in range(2 * MAX_STAGED_RECEIVES)]
    landings = [staging.receive_to_device(target, receive) for target in targets]
    for work, landing, target in reversed(list(zip(works, landings, targets, strict=True))):
        work.arrived.set()
        assert landing.wait()
        assert target.eq(7).all()


def test_a_copy_begins_behind_what_it_needs() -> None:
    """A message leaves behind what makes it, and lands behind the last use of the memory it lands in."""
    copies = LateCopies()
    staging = HostStaging(copies)
    host, copied = staging.copy_to_host(torch.arange(3.0))
    copied()
    assert host.tolist() == [0.0, 1.0, 2.0]
    landing = staging.receive_to_device(torch.zeros(3), lambda host: _arrived(host))
    copies.record_event()  # what is computed after the receive was posted does not hold it up
    landing.wait()
    assert copies.told[:3] == [("mark", 0), ("copy", 0), ("mark", 2)]
    assert ("copy", 2) in copies.told


def _arrived(host: torch.Tensor) -> Arriving:
    work = Arriving(host)
    work.arrived.set()
    return work


class Sent:
    """A send that is over."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.seen = tensor.clone()

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Slow(LateCopies):
    """A device whose copies end once `may_end` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = threading.Event()

    def wait_event(self, event) -> None:  # type: ignore[no-untyped-def]
        assert self.may_end.wait(DEADLINE_S)
        super().wait_event(event)


class Noting(Communicator):
    """An exchange without peers, which records what it sends."""

    def start_message(self, message: TensorMessage) -> Sent:
        return Sent(message.tensor)


def test_the_computing_thread_does_not_wait_for_copies() -> None:
    """A send is handed over before its copy has ended, and carries what the tensor held, laid straight."""
    copies = Slow()
    exchange = Noting("ab", 0, staging=HostStaging(copies))
    tensor = torch.arange(6.0).reshape(2, 3).t()
    (work,) = exchange.start([TensorMessage(tensor, 1, 5, True)])
    assert not work.is_completed()
    copies.may_end.set()
    exchange.wait(work)
    seen = work.started_work().seen
    assert seen.is_contiguous()
    assert torch.equal(seen, tensor)


def test_copies_in_host_memory_are_of_their_own() -> None:
    """Any shapes and types at once, laid straight."""
    tensors = [torch.arange(6.0).reshape(2, 3).t(), torch.zeros(()), torch.ones(4, dtype=torch.bfloat16)]
    for copy, tensor in zip(copy_tensors_to_host(tensors), tensors, strict=True):
        assert torch.equal(copy, tensor)
        assert copy.is_contiguous()
        assert copy.data_ptr() != tensor.data_ptr()


class Tape:
    """Stands in for the streams, events and tensors of a device: notes what is asked of which, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.now = "computing"
        streams = iter(("out", "in"))
        monkeypatch.setattr(torch.cuda, "Stream", lambda _: OnTape(self, next(streams)))
        monkeypatch.setattr(torch.cuda, "Event", lambda blocking=False: f"a{' quiet' * blocking} event")
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: OnTape(self, self.now))
        monkeypatch.setattr(torch.cuda, "stream", self.on)

    @contextmanager
    def on(self, stream: OnTape) -> Iterator[None]:
        before, self.now = self.now, stream.name
        yield
        self.now = before


class OnTape:
    """A stream, or a tensor, called `name`."""

    def __init__(self, tape: Tape, name: str, is_cuda: bool = False) -> None:
        self.tape, self.name, self.is_cuda = tape, name, is_cuda

    def wait_event(self, event: str) -> None:
        self.tape.said.append(f"{self.name} waits for {event}")

    def record_event(self, event: str = "a point") -> str:
        self.tape.said.append(f"{self.name} records {event}")
        return f"{event} of {self.name}"

    def copy_(self, source: OnTape, *, non_blocking: bool) -> None:
        assert non_blocking
        self.tape.said.append(f"{self.tape.now} copies {source.name} to {self.name}")

    def record_stream(self, stream: OnTape) -> None:
        self.tape.said.append(f"{self.name} is used on {stream.name}")


def test_copies_of_a_card_are_ordered_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out on one stream and in on another: behind the computing stream, memory kept, an end to sleep on.

    What the calls do to a card is for the tests marked `gpu`; here is their order.
    """
    tape = Tape(monkeypatch)
    copies = CudaCopyEngine(torch.device("cuda", 0))
    made, room, host = OnTape(tape, "result", True), OnTape(tape, "room", True), OnTape(tape, "host")
    assert copies.copy_async(made, host, copies.record_event()) == "a quiet event of out"
    assert copies.copy_async(host, room, copies.record_event()) == "a quiet event of in"
    assert tape.said == [
        "computing records a point", "out waits for a point of computing", "out copies result to host",
        "result is used on out", "out records a quiet event",
        "computing records a point", "in waits for a point of computing", "in copies host to room",
        "room is used on in", "in records a quiet event",
    ]  # fmt: skip
