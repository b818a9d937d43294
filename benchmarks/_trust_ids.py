"""Identity of jobs: submissions of equal content, sent through the path that a server takes, are as many jobs."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.control_store import BULK, submission
from benchmarks.table import Row, compared
from isthmus.control.service.coordinator_actor import CoordinatorActor
from isthmus.control.service.submissions import Submissions
from isthmus.control.state.events import JobSubmitted
from isthmus.control.store.sqlite_store import SqliteStore
from isthmus.control.store.store_interface import Store
from isthmus.core.runs.job_id import RANDOM_BYTES, make_job_id


def measure(quick: bool) -> list[Row]:
    """Return how many of the drawn ids are equal, and how many acknowledged submissions are lost or merged."""
    num_drawn, num_sent = (100_000, 5_000) if quick else (1_000_000, 100_000)
    begun_s = time.process_time()
    drawn = secrets.token_bytes(RANDOM_BYTES * num_drawn)
    ids = {make_job_id("same", drawn[i : i + RANDOM_BYTES]) for i in range(0, len(drawn), RANDOM_BYTES)}
    used_s = time.process_time() - begun_s
    short = {one[: len("same-") + 8] for one in ids}
    what = f"{num_drawn:,} ids of equal submissions, {used_s:.2f} s of CPU: equal ones"
    peer, peer_value = "ids of 32 bits", num_drawn - len(short)
    equal = num_drawn - len(ids)
    rows = [compared(what, equal, "", peer, peer_value, target="0", met=equal == 0)]
    for of, draw in (
        ("ids of 128 random bits", secrets.token_bytes),
        ("a broken source of 20 random bits", _poor_source),
    ):
        lost, wall_s, used_s = _lost(num_sent, draw)
        what = f"{num_sent:,} equal submissions without a key into SQLite, {of}, {wall_s:.1f} s, {used_s:.1f} s of CPU"
        rows.append(Row(what=f"{what}: lost or merged", ours=lost, unit="", target="0", met=lost == 0))
    return rows


def _poor_source(count: int) -> bytes:
    """Return bytes of which only the first 20 bits of each id are random, so that ids collide."""
    drawn = (secrets.randbits(20) << (8 * RANDOM_BYTES - 20) for _ in range(count // RANDOM_BYTES))
    return b"".join(one.to_bytes(RANDOM_BYTES, "big") for one in drawn)


def _lost(num_sent: int, draw: Callable[[int], bytes]) -> tuple[int, float, float]:
    """Return how many acknowledged submissions the reopened log lacks, with the wall and CPU seconds."""
    same = submission("same").model_copy(update={"key": ""})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "isthmus.db"
        store: Store = SqliteStore(file)
        accepted = Submissions(CoordinatorActor(store, lambda _: None), None, time.time, draw)
        begun_s, begun_cpu_s = time.monotonic(), time.process_time()
        answers = [str(one) for _ in range(0, num_sent, BULK) for one in accepted.submit_all("ann", [same] * BULK)]
        wall_s, used_s = time.monotonic() - begun_s, time.process_time() - begun_cpu_s
        store.close()
        store = SqliteStore(file)
        kept = [event.job_id for _, event in store.events() if isinstance(event, JobSubmitted)]
        store.close()
    return num_sent - len(set(answers) & set(kept)), wall_s, used_s
