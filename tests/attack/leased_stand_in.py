"""The stand-in of a worker (`tests/agent/stand_in.py`) that ends itself with its site's lease, as a real one does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from isthmus.train.liveness.run_lease_watch import RunLeaseWatch, end_with_run_lease
from tests.agent import stand_in

if __name__ == "__main__":
    spec = json.loads((Path(sys.argv[1]) / "spec.json").read_text())
    end_with_run_lease(RunLeaseWatch(Path(spec["run_lease"])))
    stand_in.main()
