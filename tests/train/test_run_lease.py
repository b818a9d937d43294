"""The lease on which a rank ends itself: read from its file, by a clock that is never set; and a real supervisor."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.control.state.coordinator_config import CoordinatorConfig
from isthmus.core.messages.run_lease import RunLease, write_run_lease
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


def test_a_lease_of_another_start_of_the_machine_has_ended(tmp_path: Path) -> None:
    """Its clock began anew."""
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
