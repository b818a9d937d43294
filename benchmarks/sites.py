"""Real sites: jobs over real Slurm clusters on this machine, and what their schedulers' faults do to them.

`start`: one job over two Slurm clusters through a real server and two agents, from its submission to the first line of
the last rank's program, beside a bare `srun` of the same line on the slower cluster just before. `start-kinds`: the
same over a Slurm, a Ray and a local site. `look`: one look of an agent at 2,000 jobs. `kills`: slurmctld killed within
2 s of 20 accepted jobs, beside jobs of plain `sbatch`. `faults`: lost and late replies, killed daemons, agents that
forget everything, and releases at any step, by seeds. The parts on Slurm need root and its Debian packages.
`kubernetes`: one look at 2,000 pods of a real API server (`make kubernetes`); `kubernetes-faults`: lost replies and a
killed server, by seeds; `kubernetes-events`: events of an API server that is killed and whose log is compacted, 1,000
times. `ray-faults`: lost requests and replies, a dashboard out of reach, agents that forget everything, by seeds (the
extra `ray`).
`courier`: a run folder whose log grows by 10 MB/s is carried over a link with random cuts.

  python -m benchmarks.sites                  # all
  python -m benchmarks.sites --quick          # fewer jobs, kills and faults
  python -m benchmarks.sites --only look      # one part; may be repeated
  python -m benchmarks.sites --limit-s 600    # repeated faults and kills end after 600 s a part; rows say how many
  python -m benchmarks.sites --only faults --record RUNS  # go on with the runs in RUNS, also beside another process
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import (
    _sites_courier,
    _sites_kinds_start,
    _sites_kubernetes,
    _sites_kubernetes_faults,
    _sites_ray_faults,
    _sites_slurm_faults,
    _sites_slurm_kills,
    _sites_slurm_look,
    _sites_slurm_start,
)
from benchmarks._sites_amount import Amount
from benchmarks.table import Row, print_rows, run_parts
from tests.kubernetes.api_server import missing_programs as missing_server
from tests.ray.ray_cluster import missing_ray
from tests.slurm.slurm_cluster import missing_programs

SLURM_PARTS: dict[str, Callable[[Amount], list[Row]]] = {
    "start": _sites_slurm_start.rows,
    "start-kinds": _sites_kinds_start.rows,
    "look": _sites_slurm_look.rows,
    "kills": _sites_slurm_kills.rows,
    "faults": _sites_slurm_faults.rows,
}
KUBERNETES_PARTS: dict[str, Callable[[Amount], list[Row]]] = {
    "kubernetes": _sites_kubernetes.rows,
    "kubernetes-faults": _sites_kubernetes_faults.rows,
    "kubernetes-events": _sites_kubernetes_faults.event_rows,
}
RAY_PARTS = ("start-kinds", "ray-faults")
PARTS: dict[str, Callable[[Amount], list[Row]]] = {
    **SLURM_PARTS,
    **KUBERNETES_PARTS,
    "ray-faults": _sites_ray_faults.rows,
    "courier": _sites_courier.rows,
}
"""The rows of each part, by how much of it is asked for."""


def main() -> int:
    """Run the parts and print their rows; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="seconds after which faults and kills end")
    parser.add_argument("--record", type=Path, help="folder that keeps the seeded runs: a later call goes on with them")
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part; may be repeated")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args()
    chosen = []
    for name in arguments.only or PARTS:
        if name in SLURM_PARTS and (missing_programs() or os.geteuid() != 0):
            print(
                f"{name}: needs root and Slurm: apt-get install -y slurmctld slurmd slurm-client munge", file=sys.stderr
            )
            continue
        if name in KUBERNETES_PARTS and missing_server():
            print(f"{name}: needs {', '.join(missing_server())}", file=sys.stderr)
            continue
        if name in RAY_PARTS and missing_ray():
            print(f"{name}: needs Ray: {missing_ray()}", file=sys.stderr)
            continue
        chosen.append(name)
    rows = run_parts({name: functools.partial(_run, name, arguments) for name in PARTS}, chosen)
    print_rows(rows, arguments.json)
    return int(any(row.met is False for row in rows))


def _run(name: str, arguments: argparse.Namespace) -> list[Row]:
    return PARTS[name](Amount(quick=arguments.quick, limit_s=arguments.limit_s, record=arguments.record))


if __name__ == "__main__":
    sys.exit(main())
