"""Rules of `transport: process` in real workers: the same bits, a killed process costs a step at most."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from isthmus.comm.rdma.open_device import USER_SPACE
from isthmus.comm.rdma.user_space_device import UserSpaceDevice
from isthmus.core.errors import PlanError
from isthmus.core.messages.worker_folder import WorkerSpec
from isthmus.train.liveness.worker_events import read_events
from isthmus.train.process.check_plan_matches_job import check_job_transport
from isthmus.train.process.check_plan_supported import check_plan_supported
from isthmus.wan.roce.roce_opcodes import UDP_PORT
from tests.comm.test_rdma import address
from tests.train.worker_jobs import Workers, make_job, make_plan, run_job, started

STEPS = 40
PAUSES = {"forward_s": 0.005, "backward_s": 0.01}
"""So that steps take long enough for something to befall a rank in the middle of the run."""


def processes_of(workers: Workers, rank: int) -> tuple[list[int], list[int]]:
    """Return the processes of a rank: those of its transport, and its others but the first."""
    carriers, others, group = list[int](), list[int](), workers.processes[rank].pid
    for place in Path("/proc").iterdir():
        try:
            command = (place / "cmdline").read_bytes() if place.name.isdigit() else b""
            if command and os.getpgid(int(place.name)) == group and int(place.name) != group:
                (carriers if b"isthmus.comm.process.transport_process" in command else others).append(int(place.name))
        except (OSError, ProcessLookupError):
            continue
    return carriers, others


@pytest.mark.slow
def test_a_process_carries_what_threads_do_and_its_death_costs_a_step(tmp_path: Path) -> None:
    """1. Two stages in two clusters train by threads. 2. The same by processes, of which one is killed, and
    later the other rank's own. 3. The losses are the same bits, and nothing is left running.
    """
    job = make_job(tmp_path, steps=STEPS)
    plan = make_plan(job, [1, 4], "ab")
    straight = run_job(tmp_path / "thread", job, plan)
    elsewhere = job.checkpoints.model_copy(update={"folder": str(tmp_path / "elsewhere")})
    job = job.model_copy(update={"transport": "process", "checkpoints": elsewhere})
    how = {"program": "supervisor", "stage_time": PAUSES}
    with started(tmp_path / "process", job, plan, **how) as workers:
        workers.wait_for_step(3)
        (carrier,), _ = processes_of(workers, 1)
        os.kill(carrier, signal.SIGKILL)
        workers.wait_for_step(10)
        _, (own,) = processes_of(workers, 0)
        os.kill(own, signal.SIGKILL)
        assert workers.wait() == [0, 0], [workers.log(rank) for rank in range(2)]
        assert [processes_of(workers, rank) for rank in range(2)] == [([], [])] * 2
    by_step = {one.step: one.values["loss"] for one in workers.metrics(1) if "loss" in one.values}
    assert [by_step[step] for step in range(STEPS)] == straight.losses()
    told = [one for one in read_events(workers.folders[1]) if one.kind == "lost"]
    assert "the transport process of rank 1 was killed by SIGKILL" in told[0].detail
    kinds = [one.kind for one in read_events(workers.folders[1])]
    assert "died" not in kinds
    assert kinds.count("resumed") == 2


@pytest.mark.slow
def test_ranks_of_two_clusters_train_by_rdma(tmp_path: Path, whole: bool) -> None:
    """Connections that go on over queue pairs, here in user space, carry a step's tensors to the same bits."""
    if not whole:
        pytest.skip("with --whole: two jobs of two workers")
    job = make_job(tmp_path, steps=3)
    plan = make_plan(job, [1, 4], "ab")
    straight = run_job(tmp_path / "tcp", job, plan)
    elsewhere = job.checkpoints.model_copy(update={"folder": str(tmp_path / "elsewhere")})
    job = job.model_copy(update={"checkpoints": elsewhere})
    places = {name: address() for name in "ab"}
    devices = {name: f"{USER_SPACE}{place}" for name, place in places.items()}
    with started(tmp_path / "rdma", job, plan, rdma=devices) as workers:
        workers.wait_for_step(1)
        for place in places.values():
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, pytest.raises(OSError, match="in use"):
                probe.bind((place, UDP_PORT))
        assert workers.wait() == [0, 0], [workers.log(rank) for rank in range(2)]
    assert workers.losses() == straight.losses()


@pytest.mark.parametrize("transport", ["thread", "process"])
def test_a_rank_without_a_card_is_refused_before_start(tmp_path: Path, transport: str) -> None:
    """The error names the link, the machine and what to do; without a link by RDMA in the plan no card is needed."""
    job, card = make_job(tmp_path, transport=transport), {"b": "no-card"}
    near, far = (make_plan(job, [2, 4], clusters) for clusters in ("aa", "ab"))
    check_plan_supported(WorkerSpec(run="r", attempt=1, rank=0, job=job, plan=near, rdma=card))
    check_plan_supported(WorkerSpec(run="r", attempt=1, rank=1, job=job, plan=far, rdma=card))
    refused = WorkerSpec(run="r", attempt=1, rank=0, job=job, plan=far, rdma=card)
    with pytest.raises(
        PlanError, match=rf"a and b has `transport: rdma`: no .*{socket.gethostname()}.*nodes have RDMA"
    ):
        check_plan_supported(refused)
    place = address()
    check_plan_supported(WorkerSpec(run="r", attempt=1, rank=0, job=job, plan=far, rdma={"b": USER_SPACE + place}))
    UserSpaceDevice(place).close()  # the look has left it to the transport


def spec_of(folder: Path, **spec: object) -> WorkerSpec:
    job = make_job(folder, transport="process")
    return WorkerSpec(run="r", attempt=1, rank=0, job=job, plan=make_plan(job, [2, 4], "aa"), **spec)


def test_a_process_is_refused_where_there_can_be_none(tmp_path: Path) -> None:
    """Another backend has no transport, another system no such memory: said before start, with what to do."""
    check_plan_supported(spec_of(tmp_path))
    with pytest.raises(PlanError, match=r"'gloo' does not support transport: process.*transport: thread"):
        check_plan_supported(spec_of(tmp_path, backend="gloo"))
    with pytest.raises(PlanError, match=r"\(memfd_create\), which this machine lacks.*transport: thread"):
        check_job_transport(spec_of(tmp_path), has_shared_memory=False)
