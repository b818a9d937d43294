"""`python -m benchmarks._crossing_site POOL SITE STATE`: what `pool.yaml` states for a site, until its input ends.

Prints its routes and the process of each part as JSON, and again after each line of input.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from isthmus.core.files.user_files import load_pool
from isthmus.wan import process_ids, site_crossings


def main() -> None:
    """Start the processes of the site."""
    pool, site, state = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    crossings = site_crossings(load_pool(pool), site, pool.parent, state, {}, None)
    if crossings is None:
        raise SystemExit(f"{pool} states no crossing of {site}")
    with crossings:
        found = {"routes": crossings.plan.routes(), "pids": process_ids(crossings)}
        print(json.dumps(found), flush=True)
        for _ in sys.stdin:
            print(json.dumps(found | {"pids": process_ids(crossings)}), flush=True)


if __name__ == "__main__":
    main()
