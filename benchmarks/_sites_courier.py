"""The courier under load: a program writes 10 MB/s far from the agent while its connection breaks at random.

Both ends are processes of their own, and so is the program; a relay between them breaks connections by a seed.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks._sites_amount import Amount
from benchmarks.table import Row
from isthmus.agent.courier.courier import Courier
from isthmus.agent.courier.courier_archive import courier_archive
from isthmus.agent.courier.start_file import write_start
from tests.courier.relay import CuttingRelay

RATE_BYTES_PER_S = 10_000_000
MEAN_CUT_BYTES = 20_000_000
SEED = 14
CPU_SHARE = 0.03

_AGENT = """
import sys, time
from pathlib import Path
from isthmus.agent.courier.courier import Courier
courier = Courier(Path(sys.argv[1]))
while True:
    time.sleep(60)
"""
_WRITER = """
import hashlib, sys, time
log, end, number = open(sys.argv[1], "wb", buffering=0), time.monotonic() + float(sys.argv[2]), 0
rate, begun, digest = float(sys.argv[3]), time.monotonic(), hashlib.sha256()
while time.monotonic() < end:
    piece = (f"{number:09d} " * 2000).encode()
    log.write(piece)
    digest.update(piece)
    number += 1
    time.sleep(max(0.0, begun + number * len(piece) / rate - time.monotonic()))
open(sys.argv[1] + ".sha256", "w").write(digest.hexdigest())
"""


def rows(amount: Amount) -> list[Row]:
    """Return what arrived and what it cost: 60 s of a program's output, 10 s of a quick run."""
    seconds = 10.0 if amount.quick else 60.0
    with tempfile.TemporaryDirectory() as root:
        return _measure(Path(root), seconds)


def _measure(root: Path, seconds: float) -> list[Row]:
    folder, hold = root / "state" / "run", root / "state" / "hold"
    for one in (folder, hold):
        one.mkdir(parents=True)
    (hold / "lease").write_text("1 600\n")
    metrics = folder / "metrics.jsonl"
    write_start(folder, ("{python}", "-c", _WRITER, str(metrics), str(seconds), str(RATE_BYTES_PER_S)), {})
    courier = Courier(root / "state")
    ticket = json.loads(courier.ticket(folder, hold))
    courier.close()
    relay = CuttingRelay(ticket["port"], SEED, MEAN_CUT_BYTES)
    (root / "ticket").write_text(json.dumps(ticket | {"port": relay.port}))
    (root / "courier.pyz").write_bytes(courier_archive())
    agent = psutil.Popen([sys.executable, "-c", _AGENT, str(root / "state")])
    worker = psutil.Popen(
        [sys.executable, str(root / "courier.pyz"), "--ticket", str(root / "ticket"), "--work", str(root / "work")],
        stdin=subprocess.DEVNULL, env=dict(os.environ),
    )  # fmt: skip
    try:
        while not metrics.exists() and worker.poll() is None:
            time.sleep(0.05)
        before = [_cpu_s(one) for one in (agent, worker)]
        time.sleep(seconds - 1.0)
        shares = [(_cpu_s(one) - start) / (seconds - 1.0) for one, start in zip((agent, worker), before, strict=True)]
        worker.wait(timeout=120)
        wrong = 0 if _same(metrics) else 1
        what = f"courier, {metrics.stat().st_size / 1e6:.0f} MB at 10 MB/s, {relay.num_cuts} cuts by seed"
        return [
            Row(what=f"{what}: files with a lost, doubled or changed byte", ours=wrong, unit="files", target="0",
                met=wrong == 0 and relay.num_cuts > 0),
            *(Row(what=f"{what}: CPU of the {end}", ours=100 * share, unit="% of a core", target="at most 3",
                  met=share <= CPU_SHARE) for end, share in zip(("agent's end", "worker's end"), shares, strict=True)),
        ]  # fmt: skip
    finally:
        for one in (worker, agent):
            if one.poll() is None:
                one.kill()
                one.wait()
        relay.close()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _same(metrics: Path) -> bool:
    digest = metrics.with_name(metrics.name + ".sha256")
    return digest.exists() and digest.read_text() == hashlib.sha256(metrics.read_bytes()).hexdigest()
