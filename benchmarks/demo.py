"""The demo, measured: its steps beside the planner's prediction, and beside the same plan without its links.

The prediction knows only the pool file and the model: the stages' times are those of virtual chips (which
real computing is padded to), the links those `benchmarks.wan_links` checks. Nothing is fitted to the run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile

from benchmarks.table import Row, compared, print_rows

STEPS, QUICK_STEPS = 40, 12


def run_demo(steps: int) -> dict[str, float]:
    """Run the demo for `steps` steps in a folder of its own and return its last line."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "isthmus", "demo", "--json", "--steps", str(steps)]
        done = subprocess.run(
            [*command, "--state", f"{folder}/demo"], stdout=subprocess.PIPE, text=True, check=True
        )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def rows(steps: int) -> list[Row]:
    """Return the rows of one demo."""
    result = run_demo(steps)
    error = result["predicted_iteration_s"] / result["iteration_s"] - 1
    near_s = result["iteration_s"] * result["efficiency"]
    return [
        compared(
            f"predicted step, {steps} steps",
            result["predicted_iteration_s"],
            "s",
            "measured",
            result["iteration_s"],
            target="within 10 %",
            met=abs(error) <= 0.10,
        ),
        compared(
            "step with wide-area links",
            result["iteration_s"],
            "s",
            "the same plan without them",
            near_s,
        ),
        Row(
            what="loss in transformers against the runtime's",
            ours=result["checkpoint_loss_difference"],
            unit="nats",
            target="at most 1e-4",
            met=result["checkpoint_loss_difference"] <= 1e-4,
        ),
    ]


if __name__ == "__main__":
    print_rows(rows(QUICK_STEPS if "--quick" in sys.argv else STEPS), "--json" in sys.argv)
