"""The protocol of commit and joint preemption, model-checked: every state of three owners and two jobs.

The real coordinator and the real agents' machines, a network that loses, delays and repeats, agents and
servers that die; owners' names do not count, and there is no time (`docs/design/model-check.md`). A row is
one scenario: the sites of each job, and how many faults there may be. `--quick` runs those of the tests.
"""

from __future__ import annotations

import sys
import time

from benchmarks.table import Row, print_rows
from tests.control.model.explore import Found, explore
from tests.control.model.pool import QUICK, WHOLE, Pool, Scenario


def check(scenario: Scenario) -> list[Row]:
    """Explore one scenario; return its rows."""

    def tell(found: Found) -> None:
        print(f"{scenario}: {found.num_states:,} states, {found.wall_s:.0f} s", file=sys.stderr, flush=True)

    cpu_s = time.process_time()
    found = explore(Pool(scenario), progress=tell)
    cpu_s = time.process_time() - cpu_s
    for line in found.trace:
        print(f"  {line}", file=sys.stderr)
    if found.wrong:
        print(found.wrong, file=sys.stderr)
    met = found.complete and not found.wrong
    return [
        Row(what=f"{scenario}: states", ours=found.num_states, unit="states",
            target="all of them, nothing wrong", met=met),
        Row(what=f"{scenario}: steps, {found.depth} deep", ours=found.num_steps, unit="steps"),
        Row(what=f"{scenario}: time", ours=cpu_s, unit="CPU s"),
        Row(what=f"{scenario}: time", ours=found.wall_s, unit="s"),
    ]  # fmt: skip


def main() -> int:
    """Print the rows of every scenario."""
    rows = []
    for scenario in QUICK if "--quick" in sys.argv else WHOLE:
        rows += check(scenario)
    print_rows(rows, "--json" in sys.argv)
    return 0 if all(row.met is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
