"""How far predictions are from published measurements: `python -m benchmarks.published [--vtrain FOLDER]`.

`--torchtitan`, `--flagperf` and `--bridge` name copies of the repositories of public sets, which adapters read; each is
split by seed into runs that a calibration may see and runs that it is compared with. `--runs` prints each run of them.

Three tables: the tasks of the cross-domain pooling report (5.2), vTrain's points (read from a copy of its
repository, `--vtrain` or ISTHMUS_VTRAIN in the environment), and runs of papers and submissions. No prediction is
compared with a run that its calibration has seen. The defaults of the time model were chosen with vTrain's points
in view, so `data sheet only` is no blind test for them; for the papers' runs it is. `--quick` leaves the papers out.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from benchmarks import _rows, _tasks, _vtrain
from benchmarks._public_rows import READERS, public_rows, run_lines
from benchmarks.table import Row, print_rows
from isthmus.core.files.user_files import load_plan, load_pool
from isthmus.core.model import load_model
from isthmus.plan import estimate_s, profile_model

EXAMPLE = Path(__file__).parent.parent / "docs" / "guide" / "example"


def estimate_row() -> Row:
    """How long the closed form takes for a plan of eight stages on two sites, CPU time, mean of many."""
    plan, pool = load_plan(EXAMPLE / "plan.yaml"), load_pool(EXAMPLE / "pool.yaml")
    profile, count = profile_model(load_model(EXAMPLE / "config.json")), 200
    estimate_s(plan, pool, profile)
    begun_s = time.process_time()
    for _ in range(count):
        estimate_s(plan, pool, profile)
    each_ms = (time.process_time() - begun_s) / count * 1e3
    what = "analytic estimate of a plan of eight stages, CPU time"
    return Row(what=what, ours=each_ms, unit="ms", target="at most 1", met=each_ms <= 1)


def main() -> int:
    """Print every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--quick", action="store_true", help="one split, and no rows of papers")
    parser.add_argument("--vtrain", type=Path, help="a copy of vTrain's repository")
    for name in READERS:
        parser.add_argument(f"--{name}", type=Path, help=f"a copy of the repository of {name}'s set")
    parser.add_argument("--only-sets", action="store_true", help="no rows but those of the public sets named")
    parser.add_argument("--runs", action="store_true", help="a line for each run of the sets, instead of rows")
    args = parser.parse_args()
    sets = {name: folder for name in READERS if (folder := getattr(args, name)) is not None}
    if args.runs:
        print("\n".join(line for name, folder in sets.items() for line in run_lines(name, folder)))
        return 0
    public = [row for name, folder in sets.items() for row in public_rows(name, folder)]
    if args.only_sets:
        print_rows(public, args.json)
        return 0
    told = os.environ.get("ISTHMUS_VTRAIN")
    folder = args.vtrain or (Path(told) if told else None)
    rows = [*_tasks.rows(), estimate_row(), *_vtrain.rows(folder, quick=args.quick)]
    if not args.quick:
        rows += _rows.rows()
    rows += public
    print_rows(rows, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
