"""The `local` adapter: the contract of every adapter, and what only processes of this machine can show."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from isthmus.agent.adapters.check_adapter import ContractError, check_adapter, is_running
from isthmus.agent.adapters.local_adapter import LocalAdapter, worker_environment
from isthmus.agent.adapters.rules.program_rules import variables_of_a_start_arrive
from isthmus.agent.adapters.rules.worker_rules import clocks_of_nodes_do_not_matter
from isthmus.agent.adapters.scheduler_adapter import RankStart, WorkerStatus
from isthmus.core.pool import Cluster, NodeGroup, VirtualChip
from tests.until import until

SITE = Cluster(
    name="east",
    owner="o",
    node_groups=(NodeGroup(name="h20", chip="H20", nodes=2, chips_per_node=2, virtual=VirtualChip()),),
)


@pytest.mark.slow
def test_the_local_adapter_keeps_the_contract(tmp_path: Path) -> None:
    """Every rule of `SchedulerAdapter` holds for real processes of this machine."""
    check_adapter(lambda command: LocalAdapter(SITE, tmp_path / "queue", command), tmp_path)


class StartsTwice(LocalAdapter):
    """An adapter with the fault the contract is most about: it forgets the claim on a folder."""

    def start(self, rank: RankStart) -> None:
        (rank.folder / "pid").unlink(missing_ok=True)
        super().start(rank)


@pytest.mark.slow
def test_the_kit_finds_an_adapter_that_starts_twice(tmp_path: Path) -> None:
    """A conformance kit that cannot fail proves nothing."""
    with pytest.raises(ContractError, match=r"started once|exited"):
        check_adapter(lambda command: StartsTwice(SITE, tmp_path / "queue", command), tmp_path, timeout_s=3)


class LetsAll(LocalAdapter):
    """An adapter that ignores the limits of a worker."""

    def start(self, rank: RankStart) -> None:
        (rank.folder / "limits.json").unlink(missing_ok=True)
        super().start(rank)


@pytest.mark.slow
def test_the_kit_finds_an_adapter_that_applies_no_limits(tmp_path: Path) -> None:
    """An adapter of another scheduler starts the program through the same limits."""
    with pytest.raises(ContractError, match="with the limits of its folder"):
        check_adapter(lambda command: LetsAll(SITE, tmp_path / "queue", command), tmp_path, timeout_s=3)


class DropsVariables(LocalAdapter):
    """An adapter that ignores what job and owner have set for a worker."""

    def start(self, rank: RankStart) -> None:
        super().start(replace(rank, variables={}))


@pytest.mark.slow
def test_the_kit_finds_an_adapter_that_drops_settings(tmp_path: Path) -> None:
    """Settings of templates and of the job's communication library must reach the worker at every kind of site."""
    with pytest.raises(ContractError, match="variables of a start arrive"):
        check_adapter(
            lambda command: DropsVariables(SITE, tmp_path / "queue", command), tmp_path, timeout_s=3,
            rules=(variables_of_a_start_arrive,),
        )  # fmt: skip


class ComparesClocks(LocalAdapter):
    """An adapter that takes a worker for lost whose files are old by the agent's clock."""

    def poll(self, folder: Path) -> WorkerStatus:
        age_s = time.time() - (folder / "pid").stat().st_mtime if (folder / "pid").exists() else 0.0
        return WorkerStatus(state="exited", exit_status=137) if age_s > 3600 else super().poll(folder)


@pytest.mark.slow
def test_the_kit_finds_an_adapter_that_compares_clocks(tmp_path: Path) -> None:
    """The clocks of an agent and of its nodes differ."""
    with pytest.raises(ContractError, match="files of another time runs on"):
        check_adapter(
            lambda command: ComparesClocks(SITE, tmp_path / "queue", command), tmp_path, timeout_s=3,
            rules=(clocks_of_nodes_do_not_matter,),
        )  # fmt: skip
    folder = tmp_path / clocks_of_nodes_do_not_matter.__name__
    (folder / "go").touch()
    until((folder / "exit").exists)


@pytest.mark.slow
def test_a_signal_after_the_end_leaves_the_exit_status(tmp_path: Path) -> None:
    """A second stop that meets the wrapper while it records the status ends nothing."""
    tools, folder = tmp_path / "tools", tmp_path / "worker"
    tools.mkdir()
    folder.mkdir()
    (tools / "mv").write_text('#!/bin/sh\nkill -TERM 0\nexec /bin/mv "$@"\n')
    (tools / "mv").chmod(0o755)
    adapter = LocalAdapter(SITE, tmp_path / "queue", ("sh", "-c", "exit 3"))
    adapter.start(RankStart(folder=folder, cards=(), variables={"PATH": f"{tools}:{os.environ['PATH']}"}))
    until(lambda: adapter.poll(folder).state == "exited")
    assert adapter.poll(folder).exit_status == 3


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[LocalAdapter, Path]]:
    """An adapter with one worker that runs until it is killed."""
    adapter = LocalAdapter(
        SITE, tmp_path / "queue", ("sh", "-c", 'echo $$ > "$1/worker"; while :; do sleep 0.02; done', "w")
    )
    adapter.start(RankStart(folder=tmp_path, cards=("h20/0/0",)))
    until(lambda: (tmp_path / "worker").exists() and (tmp_path / "worker").read_text())
    yield adapter, tmp_path
    adapter.stop(tmp_path, force=True)
    until(lambda: adapter.poll(tmp_path).state == "exited")


@pytest.mark.slow
def test_a_worker_whose_wrapper_is_killed_is_still_seen_and_stopped(
    running: tuple[LocalAdapter, Path],
) -> None:
    """Without its wrapper a worker is still running, and still ends on `stop`; its status is then 137."""
    adapter, folder = running
    wrapper, worker = int((folder / "pid").read_text()), int((folder / "worker").read_text())
    os.kill(wrapper, signal.SIGKILL)
    until(lambda: not is_running(wrapper))
    assert adapter.poll(folder).state == "running"
    assert LocalAdapter(SITE, folder / "queue").poll(folder).state == "running"
    adapter.stop(folder, force=True)
    until(lambda: adapter.poll(folder).state == "exited")
    assert adapter.poll(folder).exit_status == 137
    assert (folder / "exit").read_text() == "137\n", "the next agent finds the same"
    assert not is_running(worker)


@pytest.mark.slow
def test_another_process_with_the_old_id_is_not_the_worker(tmp_path: Path) -> None:
    """A process id that now belongs to another process is neither taken for the worker nor killed."""
    (tmp_path / "pid").write_text(f"{os.getpid()}\n")
    adapter = LocalAdapter(SITE, tmp_path / "queue")
    adapter.stop(tmp_path, force=True)
    assert adapter.poll(tmp_path).state == "exited"


@pytest.mark.slow
def test_a_program_that_is_not_there_ends_with_its_reason(tmp_path: Path) -> None:
    """A worker program that does not exist is an exit status and a line of the log, not a crash."""
    adapter = LocalAdapter(SITE, tmp_path / "queue", ("/nowhere/program",))
    adapter.start(RankStart(folder=tmp_path, cards=()))
    until(lambda: adapter.poll(tmp_path).state == "exited")
    assert adapter.poll(tmp_path).exit_status == 127
    assert "/nowhere/program" in (tmp_path / "log").read_text()


def test_cards_are_named_by_group_node_and_place() -> None:
    """Neighbours of one node are next to each other, so that a part is given whole nodes first."""
    assert LocalAdapter(SITE, Path("queue")).observe().cards() == {"h20": ("h20/0/0", "h20/0/1", "h20/1/0", "h20/1/1")}


def test_a_worker_gets_one_thread_unless_the_user_chose() -> None:
    """Many workers share a machine: each computes with one thread, but the user's word counts."""
    environment = worker_environment({"OMP_NUM_THREADS": "4"}, ["h20/0/1"], cuda_indices={})
    assert environment["OMP_NUM_THREADS"] == "4"
    assert environment["MKL_NUM_THREADS"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in environment, "a virtual card is no device"


def test_a_real_card_is_made_visible() -> None:
    """On a group that is not virtual the worker sees exactly the devices it was given."""
    devices = {"h20/0/0": 0, "h20/0/1": 1, "h20/1/0": 2, "h20/1/1": 3}
    environment = worker_environment({}, ["h20/0/1", "h20/1/1"], cuda_indices=devices)
    assert environment["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert environment["ISTHMUS_CARDS"] == "h20/0/1,h20/1/1"


def test_no_token_reaches_a_worker() -> None:
    """A worker never holds a token."""
    assert "ISTHMUS_TOKEN" not in worker_environment({"ISTHMUS_TOKEN": "x", "A": "b"}, [], cuda_indices={})
