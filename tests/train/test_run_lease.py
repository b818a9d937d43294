"""The lease on which a rank ends itself: read from its file, by a clock that is never set; and a real supervisor."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.control.state.coordinator_config import CoordinatorConfig
from isthmus.core.messages.run_lease import NO_LIMIT_S, RunLease, write_run_lease
from isthmus.core.messages.worker_folder import RUN_LEASE_ENDED
from isthmus.core.process.boot_clock import boot_id, boot_time_s
from isthmus.train.liveness.run_lease_watch import READ_INTERVAL_S, RunLeaseWatch
from tests.train.worker_jobs import make_job, started, whole


def lease(until_s: float, boot: str | None = None) -> RunLease:
    return RunLease(boot=boot_id() if boot is None else boot, lease_s=10, until_s=until_s)


def test_a_rank_ends_when_its_lease_does_and_not_while_it_is_renewed(tmp_path: Path) -> None:
    """The file is read again within a second, so that a renewal and a shorter lease both count."""
    now_s, file = [0.0], tmp_path / "lease.json"
    write_run_lease(file, lease(10))
    watch = RunLeaseWatch(file, lambda: now_s[0])
    assert not watch.has_ended
    write_run_lease(file, lease(20))
    now_s[0] = 10.0
    assert not watch.has_ended
    write_run_lease(file, lease(11))
    now_s[0] += READ_INTERVAL_S
    assert watch.has_ended
    assert not RunLeaseWatch(None, lambda: now_s[0]).has_ended, "a rank without a lease runs on"


@pytest.mark.attack
@pytest.mark.parametrize("content", [None, b"", b"{", b'{"boot":"","lease_s":1,"until_s":1e999}', b"x" * 100_000])
def test_a_lease_that_cannot_be_read_has_ended(tmp_path: Path, content: bytes | None) -> None:
    """A missing, damaged or endless file never lets a rank run on."""
    if content is not None:
        (tmp_path / "lease.json").write_bytes(content)
    assert RunLeaseWatch(tmp_path / "lease.json", lambda: 0.0).has_ended


class FarRank:
    """A rank on another machine than the agent; its clock is 5,000 s ahead of the agent's."""

    def __init__(self, folder: Path) -> None:
        self.file, self.now_s = folder / "lease.json", 5000.0

    def renew(self, until_s: float, written_s: float) -> None:
        write_run_lease(self.file, RunLease(boot="another", lease_s=60, until_s=until_s, written_s=written_s))

    def watch(self) -> RunLeaseWatch:
        return RunLeaseWatch(self.file, lambda: self.now_s)

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds


def test_a_lease_of_another_machine_holds_from_its_first_renewal(tmp_path: Path) -> None:
    """How old the file is, this machine cannot tell: until it changes, the rank does not begin."""
    rank = FarRank(tmp_path)
    rank.renew(until_s=100, written_s=40)
    watch = rank.watch()
    assert watch.has_ended
    assert not watch.wait_until_held(rank.pass_time), "an agent that is gone renews nothing"

    def renew_later(pause_s: float) -> None:
        rank.pass_time(pause_s)
        rank.renew(until_s=102, written_s=42)

    assert rank.watch().wait_until_held(renew_later)


def test_a_lease_of_another_machine_is_counted_from_before_its_renewal_was_seen(tmp_path: Path) -> None:
    """60 s were left at the writing, which was after the reading that still found the earlier file."""
    rank = FarRank(tmp_path)
    rank.renew(until_s=100, written_s=40)
    watch = rank.watch()
    rank.pass_time(READ_INTERVAL_S)
    assert watch.has_ended
    rank.renew(until_s=102, written_s=42)
    rank.pass_time(READ_INTERVAL_S)
    assert not watch.has_ended
    rank.pass_time(60 - READ_INTERVAL_S - 0.01)
    assert not watch.has_ended
    rank.pass_time(0.02)
    assert watch.has_ended
    assert not watch.wait_until_held(rank.pass_time), "a lease that has ended under a rank does not begin again"


def test_a_renewed_lease_of_another_machine_goes_on(tmp_path: Path) -> None:
    """Also across an unreadable moment, and a restart of the agent's machine, whose clock begins at 0 again."""
    rank = FarRank(tmp_path)
    rank.renew(until_s=100, written_s=40)
    watch = rank.watch()
    for second in range(1, 200):
        rank.pass_time(READ_INTERVAL_S)
        rank.renew(until_s=100 + second, written_s=40 + second)
        assert not watch.has_ended
    rank.file.write_bytes(b"{")
    rank.pass_time(30)
    assert not watch.has_ended, "what was left goes on being counted"
    write_run_lease(rank.file, RunLease(boot="third", lease_s=60, until_s=61, written_s=1))
    rank.pass_time(READ_INTERVAL_S)
    assert not watch.has_ended
    rank.pass_time(60)
    assert watch.has_ended


def test_a_lease_without_limit_needs_no_renewal(tmp_path: Path) -> None:
    """A server that sets no limit renews nothing."""
    rank = FarRank(tmp_path)
    rank.renew(until_s=NO_LIMIT_S, written_s=1)
    assert rank.watch().wait_until_held(rank.pass_time)


def test_a_lease_of_an_earlier_start_of_this_machine_has_ended(tmp_path: Path) -> None:
    """Its clock began anew, and no agent renews it."""
    write_run_lease(tmp_path / "lease.json", lease(1e9, boot="another"))
    assert RunLeaseWatch(tmp_path / "lease.json", lambda: 0.0).has_ended


@pytest.mark.slow
def test_a_real_rank_ends_with_its_lease(tmp_path: Path) -> None:
    """A rank that trains ends within the server's margin of its lease; one whose lease has ended never begins."""
    file, job = tmp_path / "lease.json", make_job(tmp_path, steps=1_000_000)
    write_run_lease(file, lease(boot_time_s() + 600))
    with started(tmp_path, job, whole(job), program="supervisor", run_lease=str(file)) as workers:
        workers.wait_for_step(1)
        write_run_lease(file, lease(boot_time_s()))
        assert workers.wait(CoordinatorConfig().run_lease_margin_s) == [RUN_LEASE_ENDED]
    with started(tmp_path, job, whole(job), attempt=2, program="supervisor", run_lease=str(file)) as workers:
        assert workers.wait() == [RUN_LEASE_ENDED]
        assert workers.folders[0].read_checkin() is None
