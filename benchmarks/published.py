"""How far from published measurements? `python -m benchmarks.published [--vtrain FOLDER] [--json] [--quick]`.

Three tables: the tasks of the cross-domain pooling report (5.2), vTrain's points (read from a copy of its
repository, `--vtrain` or the environment's ISTHMUS_VTRAIN), and runs of papers and submissions. A prediction
is never compared with a run that its calibration has seen.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks import _rows, _tasks, _vtrain
from benchmarks.table import print_rows


def main() -> int:
    """Print every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--quick", action="store_true", help="one split, and no rows of papers")
    parser.add_argument("--vtrain", type=Path, help="a copy of vTrain's repository")
    args = parser.parse_args()
    told = os.environ.get("ISTHMUS_VTRAIN")
    folder = args.vtrain or (Path(told) if told else None)
    rows = _tasks.rows() + _vtrain.rows(folder, quick=args.quick)
    if not args.quick:
        rows += _rows.rows()
    print_rows(rows, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
