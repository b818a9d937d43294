"""The alert on failing checkpoints: real workers of real agents save to a folder that is full, and then is not."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.control.receivers import webhook_receiver
from tests.e2e.site import clusters_of, make_job, make_model, running, state_is, submit, wait_until
from tests.free_ports import free_ports
from tests.monitoring.watched_pool import ALERTMANAGER, PROMETHEUS, Alerts, monitoring

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PROMETHEUS is None or ALERTMANAGER is None,
        reason="Prometheus or Alertmanager is missing: apt-get install prometheus prometheus-alertmanager",
    ),
]

NUM_BYTES, LEFT_BYTES = 64 << 20, 2 << 20
"""Of the disk, and what is left where it is full: enough for the agent's check of the folder, not for a checkpoint."""

LIMIT_S = 300.0
"""For the alert: four attempts, each with new processes of the workers."""


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a file system of `NUM_BYTES` at a folder; skip where this process may not."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder.mkdir(parents=True)
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={NUM_BYTES}".encode()):
        pytest.skip(f"cannot mount a file system: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        assert libc.umount2(os.fsencode(folder), 2) == 0


def fill(file: Path) -> None:
    """Write a file until `LEFT_BYTES` are left of the disk."""
    with suppress(OSError), file.open("wb", buffering=0) as stream:
        while True:
            stream.write(bytes(1 << 12))
    os.truncate(file, file.stat().st_size - LEFT_BYTES)


def test_a_full_checkpoint_folder_fires_the_alert_until_there_is_room(whole: bool, tmp_path: Path) -> None:
    """Each attempt ends at its checkpoint, so the time counts over attempts; the alert comes once, and its end once."""
    if not whole:
        pytest.skip("real workers start again and again: python -m pytest --whole")
    (tmp_path / "pool").mkdir()
    with (
        small_disk(tmp_path / "pool" / "tiny" / "checkpoints"),
        running(tmp_path / "pool", clusters_of({"north": 1, "south": 1}, 1.0)) as pool,
        webhook_receiver() as receiver,
    ):
        token = (pool.folder / "server" / "admin.token").read_text().strip()
        watched = SimpleNamespace(url=pool.server, trust=None, token=token, agent_port=free_ports(1)[0])
        alerts = Alerts(receiver)
        with monitoring(tmp_path / "monitoring", watched, receiver):
            model = make_model(pool.folder, "wide", vocab_size=20_000)
            made = make_job(pool.folder, "tiny", model=model, steps=10**6, every_steps=40, max_restarts=100)
            job = submit(pool.client, made).id
            kinds = lambda: [one.kind for one in pool.client.history(job).events]  # noqa: E731
            wait_until("a checkpoint is saved", lambda: "checkpoint" in kinds())
            assert alerts.states("IsthmusCheckpointsFailing") == []
            filler = pool.folder / "tiny" / "checkpoints" / "filler"
            fill(filler)
            alerts.fires("IsthmusCheckpointsFailing", LIMIT_S)
            assert "lost" in kinds(), "a checkpoint that could not be written ended an attempt"
            filler.unlink()
            alerts.ends("IsthmusCheckpointsFailing", LIMIT_S)
            pool.client.cancel(job)
            state_is(pool.client, job, "cancelled")
