"""Rules of devices: which one a worker takes, and that the way through host memory changes nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from isthmus.core.errors import PlanError
from isthmus.schedule import SCHEDULES, make_schedule
from isthmus.train.communication.torch_device import choose_device, configure_torch, supported_backends
from isthmus.train.process.check_plan_supported import check_message_order
from tests.train.devices import needs_gpu
from tests.train.test_worker import moved
from tests.train.worker_jobs import make_job, make_plan, run_job, started


@pytest.mark.parametrize(
    ("wish", "virtual", "num_cuda", "device"),
    [
        ("auto", False, 0, "cpu"),
        ("auto", False, 2, "cuda:0"),
        ("auto", True, 2, "cpu"),
        ("cpu", False, 2, "cpu"),
        ("cuda", False, 1, "cuda:0"),
        ("cuda", True, 1, "cuda:0"),
    ],
)
def test_a_worker_takes_the_first_card_it_sees(wish: str, virtual: bool, num_cuda: int, device: str) -> None:
    """A real chip is computed on as soon as torch sees one; a virtual one only where that is asked for."""
    assert choose_device(wish, virtual=virtual, num_cuda=num_cuda) == torch.device(device)


def test_a_card_that_is_not_there_is_refused() -> None:
    """A request for CUDA where there is none is refused, not served by a CPU."""
    with pytest.raises(PlanError, match="sees no CUDA device"):
        choose_device("cuda", virtual=False, num_cuda=0)


def test_a_cpu_stage_talks_through_host_backends() -> None:
    """A vendor's process group is no choice for a stage that the CPU computes."""
    assert supported_backends(torch.device("cpu")) == ("isthmus", "gloo")


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 1), (2, 6), (4, 3), (5, 9)])
def test_blocking_schedules_suit_groups_without_buffers(schedule: str, stages: int, micro_batches: int) -> None:
    """Neighbours start their common exchanges in one order: a queueing group never waits without end."""
    check_message_order(make_schedule(schedule, stages, micro_batches))


def test_schedules_that_post_ahead_do_not_suit_them() -> None:
    """Where one side posts early what the other sends late, a group that queues in order is refused."""
    for name in sorted(SCHEDULES.keys() - {"1f1b", "gpipe"}):
        with pytest.raises(PlanError, match="order their messages differently"):
            check_message_order(make_schedule(name, 4, 8))


_BATCHED = """
import sys, torch
import torch.distributed as dist
from isthmus.train.communication.communicator import Communicator, TensorMessage
rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
communicator = Communicator("aa", rank, batched=True)
theirs, mine = torch.zeros(3), torch.full((3,), float(rank))
for work in communicator.start([TensorMessage(mine, 1 - rank, 5, True), TensorMessage(theirs, 1 - rank, 5, False)]):
    communicator.wait(work)
assert theirs.eq(1 - rank).all()
assert communicator.sum_over_all(torch.tensor([rank + 0.5], dtype=torch.float64)).tolist() == [2.0]
assert communicator.all_gather_bytes(b"*" * 3 * rank) == [b"", b"***"]
assert communicator.broadcast_from_first([3, 2**40] if rank == 0 else [0, 0]) == [3, 2**40]
assert [int(one) for one in communicator.all_gather(torch.tensor([rank], dtype=torch.uint8))] == [0, 1]
communicator.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_messages_started_together_arrive(tmp_path: Path) -> None:
    """Two ranks that send to each other in one bundle both receive, as groups of a vendor's devices need."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    ranks = [subprocess.Popen([sys.executable, "-c", _BATCHED, str(rank), port]) for rank in (0, 1)]
    assert [one.wait(60) for one in ranks] == [0, 0]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.slow
def test_a_card_trains_what_a_cpu_trains(tmp_path: Path) -> None:
    """A card's loss is that of the CPU within 1e-3; a second run on the card has the same bits."""
    curves = []
    for place, device in (("cpu", "cpu"), ("one", "cuda"), ("two", "cuda")):
        job = make_job(tmp_path / place, "llama-tied")
        plan = make_plan(job, [2, 4], "ab")
        curves.append(run_job(tmp_path / place, job, plan, device=device).losses())
    assert curves[1] == curves[2]
    assert curves[1] == pytest.approx(curves[0], rel=1e-3)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.slow
def test_a_rank_killed_beside_its_card_is_replaced(tmp_path: Path) -> None:
    """In bf16, with experts: the process after it takes the card, and the curve has the same bits."""
    job = make_job(tmp_path / "model", "mixtral", steps=9, training={"precision": "bf16"})
    plan = make_plan(job, [1, 4], "ab", stage={"recompute": "full"})
    straight = run_job(tmp_path / "whole", moved(job, tmp_path / "whole"), plan, device="cuda")
    cut = moved(job, tmp_path / "cut")
    with started(tmp_path / "cut", cut, plan, program="supervisor", device="cuda") as killed:
        killed.wait_for_step(4)
        (process,) = psutil.Process(killed.processes[0].pid).children()
        process.kill()
        assert killed.wait() == [0, 0]
    last = {one.step: one.values["loss"] for one in killed.metrics(1)}
    assert [last[step] for step in sorted(last)] == straight.losses()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.slow
def test_one_rank_joins_nccl(tmp_path: Path) -> None:
    """A vendor's backend serves a run of one cluster (here of one rank: NCCL takes a card once only)."""
    job = make_job(tmp_path, "qwen3", steps=3)
    run = run_job(tmp_path, job, make_plan(job, [4], "a"), backend="nccl", device="cuda")
    assert len(run.losses()) == 3


def test_threads_are_as_told() -> None:
    """A CPU worker computes with the threads of its spec."""
    before = torch.get_num_threads()
    configure_torch(torch.device("cpu"), 2)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
