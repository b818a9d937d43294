"""The protocol of commit and joint preemption, model-checked: every state of three owners and two jobs.

It runs the real coordinator and the real state machines of agents over a network that loses, delays and repeats
messages, with agents and servers that crash. States that differ only in the names of owners are one, and there
is no time (`docs/design/model-check.md`). A row is one scenario: the sites of each job, and the number of faults
of any kind; each scenario runs in a process of its own. `--quick` runs the scenarios of the tests; `--all` adds
the largest, which take minutes and gigabytes.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from benchmarks.table import Row, print_rows
from tests.control.model.scenario import LARGEST, QUICK, WHOLE, Scenario
from tests.control.model.sweep import Swept, sweep

TELL_S = 10.0
"""So often it says how far it is."""


def check(scenario: Scenario) -> list[Row]:
    """Look at every state of one scenario; return its rows."""
    told_s = time.monotonic()

    def tell(found: Swept) -> None:
        nonlocal told_s
        if time.monotonic() - told_s > TELL_S:
            told_s = time.monotonic()
            print(f"{scenario}: {found.num_states:,} states", file=sys.stderr, flush=True)

    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    found = sweep(scenario, progress=tell)
    wall_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    for line in (*found.trace, found.wrong) if found.wrong else ():
        print(f"  {line}", file=sys.stderr)
    memory_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    by_faults = ", ".join(f"{num:,} with {faults}" for faults, num in enumerate(found.by_faults))
    return [
        Row(what=f"{scenario}: states by faults: {by_faults}", ours=found.num_states, unit="states",
            target="all of them, nothing wrong", met=not found.wrong),
        Row(what=f"{scenario}: steps", ours=found.num_steps, unit="steps"),
        Row(what=f"{scenario}: coordinators in them", ours=found.num_servers, unit="coordinators"),
        Row(what=f"{scenario}: time", ours=cpu_s, unit="CPU s"),
        Row(what=f"{scenario}: time", ours=wall_s, unit="s"),
        Row(what=f"{scenario}: memory", ours=memory_gb, unit="GB"),
    ]  # fmt: skip


def main() -> int:
    """Print the rows of every scenario."""
    parser = argparse.ArgumentParser(description=__doc__)
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="the scenarios that the tests look at")
    extent.add_argument("--all", action="store_true", help="also the largest: minutes, and gigabytes")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    scenarios = QUICK if options.quick else (*WHOLE, *LARGEST) if options.all else WHOLE
    rows = list[Row]()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for found in pool.map(check, scenarios):
            rows += found
    print_rows(rows, options.json)
    return 0 if all(row.met is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
