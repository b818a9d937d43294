"""Lost sites: seeded chaos in which sites are cut off for longer than the lease on which their workers end."""

from __future__ import annotations

import dataclasses
import time

from benchmarks.table import Row
from isthmus.control.simulation.chaos.run_chaos import CONFIG, run_chaos
from isthmus.control.simulation.faults.fault_injector import FAULT_RATES
from isthmus.control.simulation.simulated_server import MemoryLog
from isthmus.control.state.coordinator_config import CoordinatorConfig

RATES = {**FAULT_RATES, "partition": 0.02}
HASTE_S = 9.0
"""By how much the server of the control waits too short a time."""


def measure(quick: bool) -> list[Row]:
    """Return the overlaps of attempts, and those that a server finds which counts workers as ended too early."""
    num = 10 if quick else 30
    hasty = dataclasses.replace(CONFIG, run_lease_margin_s=CONFIG.run_lease_margin_s - HASTE_S)
    rows = []
    for of, config in (("waits for lease, drift and margin", CONFIG), (f"waits {HASTE_S:g} s too short", hasty)):
        begun_s, used_s = time.perf_counter(), time.process_time()
        problems, ended = _run(num, config)
        wall_s, used_s = time.perf_counter() - begun_s, time.process_time() - used_s
        what = f"{num} runs of 70 jobs, sites cut off, {ended} leases ended, {wall_s:.0f} s, {used_s:.0f} s of CPU"
        is_met = problems == 0 if config is CONFIG else problems > 0
        target = "0" if config is CONFIG else "> 0"
        rows.append(
            Row(what=f"{what}; server {of}: broken invariants", ours=problems, unit="", target=target, met=is_met)
        )
    return rows


def _run(num: int, config: CoordinatorConfig) -> tuple[int, int]:
    """Return the number of broken invariants, and of leases of lost sites that ended."""
    problems = ended = 0
    for seed in range(num):
        log = MemoryLog()
        problems += len(run_chaos(seed, log, RATES, config).problems)
        ended += sum(event.kind == "run-lease-ended" for event in log.stored)
    return problems, ended
