"""Rules of stall detection in a step: a rank that waits for a peer is not stalled, one that computes may be."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.transport.memory_transport import memory_transports
from isthmus.core.errors import PeerError
from isthmus.train.communication.communicator import CommWork, TensorMessage
from isthmus.train.communication.host_staging import HostStaging
from isthmus.train.liveness.heartbeat import Heartbeat, start_heartbeat
from isthmus.train.liveness.peer_wait import is_waiting_for_peer, waiting_for_peer
from isthmus.train.tensor_parallel.tensor_parallel_group import TensorParallelGroup
from tests.train.late_copies import LateCopies
from tests.train.threads import GroupExchange
from tests.until import until

pytestmark = pytest.mark.integration

LIMIT_S = 30.0


class Thread:
    """A thread that a failing test leaves behind without waiting for it; `join` raises its error."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._future: Future[None] = Future()
        threading.Thread(target=self._run, args=(run,), daemon=True).start()

    def _run(self, run: Callable[[], None]) -> None:
        try:
            self._future.set_result(run())
        except BaseException as error:
            self._future.set_exception(error)

    def join(self) -> None:
        self._future.result(LIMIT_S)


class LookingGroup:
    """A process group and its work handle: each call that blocks on peers notes whether the caller is marked."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def wait(self, timeout: object = None) -> bool:
        del timeout
        self.seen.append(is_waiting_for_peer(threading.get_ident()))
        return True

    def is_completed(self) -> bool:
        return False

    def start(self, *_: object) -> LookingGroup:
        return self

    allreduce = allgather = reduce_scatter = broadcast = start


def test_a_marker_lasts_as_long_as_its_block() -> None:
    """1. Blocks nest. 2. An error ends the outermost one. 3. The thread waits only until then."""
    here = threading.get_ident()

    def lose_peer() -> None:
        with waiting_for_peer():
            with waiting_for_peer():
                pass
            assert is_waiting_for_peer(here)
            raise PeerError("the peer is lost")

    with pytest.raises(PeerError):
        lose_peer()
    assert not is_waiting_for_peer(here)


def test_a_marker_is_of_one_thread() -> None:
    """A thread that waits for a peer, such as the one that copies snapshots, leaves the others unmarked."""
    with ThreadPoolExecutor(1) as pool, waiting_for_peer():
        assert not pool.submit(lambda: is_waiting_for_peer(threading.get_ident())).result(LIMIT_S)


def test_a_wait_for_a_message_is_marked() -> None:
    """`Communicator.wait` marks its thread while the message is under way, and no longer."""
    work = LookingGroup()
    (group,) = (IsthmusGroup(one, "a") for one in memory_transports(1))
    GroupExchange("a", group).wait(work)  # type: ignore[arg-type]
    assert work.seen == [True]
    assert not is_waiting_for_peer(threading.get_ident())


@pytest.mark.parametrize(
    "collective",
    [
        TensorParallelGroup.all_reduce_sum,
        TensorParallelGroup.all_reduce_max,
        TensorParallelGroup.all_gather_tokens,
        TensorParallelGroup.reduce_scatter_tokens,
        TensorParallelGroup.broadcast,
    ],
)
def test_tensor_parallel_collectives_are_marked(
    collective: Callable[[TensorParallelGroup, torch.Tensor], None],
) -> None:
    """Each collective among the ranks of a stage marks its thread while it waits for them."""
    group, peers = TensorParallelGroup(0, 2), LookingGroup()
    group.join(peers)  # type: ignore[arg-type]
    collective(group, torch.ones(1, 2, 1))
    assert peers.seen == [True]


@pytest.mark.parametrize("what", ["receive", "staged receive", "sum"])
def test_the_heartbeat_tells_a_wait_from_work(what: str) -> None:
    """Two ranks, one step. 1. The first works: `busy_since_s` is constant. 2. It waits for the second rank, itself
    or by another thread (staged): `busy_since_s` follows the clock. 3. The second rank answers, and the first works
    again.
    """
    heartbeat = Heartbeat()
    begun, may_wait, ended, may_end = (threading.Event() for _ in range(4))
    staging = HostStaging(LateCopies()) if what == "staged receive" else None
    first, second = (GroupExchange("ab", IsthmusGroup(one, "ab"), staging) for one in memory_transports(2))

    def take_part(one: GroupExchange, peer: int) -> None:
        if what == "sum":
            one.sum_over_all(torch.zeros(1, dtype=torch.float64))
        else:
            works: list[CommWork] = one.start([TensorMessage(torch.zeros(4), peer, 1, peer == 0)])
            one.wait(works[0], until_delivered=True)

    def train() -> None:
        start_heartbeat(heartbeat)
        heartbeat.begin_step(0)
        begun.set()
        assert may_wait.wait(LIMIT_S)
        take_part(first, 1)
        ended.set()
        assert may_end.wait(LIMIT_S)

    training = Thread(train)
    assert begun.wait(LIMIT_S)
    began_s = heartbeat.read().busy_since_s
    _let_beat(heartbeat)
    assert heartbeat.read().busy_since_s == began_s
    may_wait.set()
    until(lambda: heartbeat.read().busy_since_s > began_s)
    Thread(lambda: take_part(second, 0)).join()
    assert ended.wait(LIMIT_S)
    _let_beat(heartbeat)
    waited_s = heartbeat.read().busy_since_s
    _let_beat(heartbeat)
    assert heartbeat.read().busy_since_s == waited_s
    may_end.set()
    training.join()


def _let_beat(heartbeat: Heartbeat) -> None:
    """Return after a heartbeat that begins after this call."""
    for _ in range(2):
        last_s = heartbeat.read().last_beat_s
        until(lambda last_s=last_s: heartbeat.read().last_beat_s > last_s)  # type: ignore[misc]
