"""Trust boundaries: what protection costs, and what attackers gain.

`ids` submits jobs of equal content. `kills` kills a server again and again while clients submit. `steps` trains the
demo's pipeline with keys on its links and without, by turns.
`links` measures what keys of links cost, and forged greetings during a run.
`attacks` lets a stranger, a user, an owner and an agent attack a running job in a real pool, each attack by a seed.
`lost-sites` cuts sites off for longer than their workers' lease. `sites-apart` saves
and restores a checkpoint of sites without a shared disk. `connections` floods a server with silent connections and
invalid tokens. `storage` compares starts with and without checks of a user's folders. `planning` times searches
beside a hostile owner and user. Both sides of a comparison run in one process or in turn.

  python -m benchmarks.trust                       # all
  python -m benchmarks.trust --quick               # fewer ids and attacks
  python -m benchmarks.trust --only attacks        # one part
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable

from benchmarks import (
    _trust_attacks,
    _trust_connections,
    _trust_ids,
    _trust_kills,
    _trust_links,
    _trust_lost_sites,
    _trust_planning,
    _trust_sites,
    _trust_steps,
    _trust_storage,
)
from benchmarks.table import Row, print_rows, run_parts

PARTS: dict[str, Callable[[bool], list[Row]]] = {
    "ids": _trust_ids.measure,
    "kills": _trust_kills.measure,
    "steps": _trust_steps.measure,
    "links": _trust_links.measure,
    "attacks": _trust_attacks.measure,
    "lost-sites": _trust_lost_sites.measure,
    "sites-apart": _trust_sites.measure,
    "connections": _trust_connections.measure,
    "planning": _trust_planning.measure,
    "storage": _trust_storage.measure,
}


def main() -> int:
    """Run the parts and print their rows; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part; may be repeated")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args()
    parts = {name: functools.partial(part, arguments.quick) for name, part in PARTS.items()}
    rows = run_parts(parts, arguments.only or PARTS)
    print_rows(rows, arguments.json)
    return int(any(row.met is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
