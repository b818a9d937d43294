"""Parallelism: what the runtime's and the planner's ways to divide training are worth, each beside what is usual.

`schedules` searches schedules for pipelines across 2 to 4 sites, at the peak memory of 1F1B, and simulates them beside
1F1B, interleaved, zero-bubble and overlapped schedules; small pipelines are compared with their exact solution.

`losses` trains random plans (cp, tp, pp, dp, ep, ZeRO 0 to 3), dense and with experts, in up to 8 processes on
this machine, and compares the loss of each step with that of one process. `reduction` sums the gradients of two
replicas after the last backward pass and during it, and compares what a step waits for; DDP over gloo is beside it.
`local` runs local SGD between two sites on virtual chips over an emulated link, beside what was predicted.
`precision` trains two stages of unlike precision, and compares the losses and the time of a step with those of fp32.

`zero` trains by ZeRO 2 and 3 over four ranks: bytes of gradients and weights beside the memory model, and a step of
ZeRO 3 beside torch's `fully_shard` over gloo.

`context` computes a layer on 16,384 tokens that 4 ranks share; `ahead` counts the host's waits for a device stand-in.

`experts` trains a mixture of experts whose ranks share them, beside one process, and counts the bytes of its exchanges.

`torchtitan` trains its Llama, and the same sizes by the runtime's workers, in one group of 4 CPU ranks each, by turns
(torchtitan 0.2.0 and what it imports: `pip install --target FOLDER`, then `--torchtitan FOLDER`).

  python -m benchmarks.parallel                      # all
  python -m benchmarks.parallel --quick              # fewer cases
  python -m benchmarks.parallel --only schedules     # one part
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable

from benchmarks import (
    _parallel_ahead,
    _parallel_context,
    _parallel_experts,
    _parallel_local_steps,
    _parallel_losses,
    _parallel_precision,
    _parallel_reduction,
    _parallel_schedules,
    _parallel_titan,
    _parallel_zero,
)
from benchmarks.table import Row, print_rows, run_parts

PARTS: dict[str, Callable[[bool], list[Row]]] = {
    "schedules": _parallel_schedules.measure,
    "losses": _parallel_losses.measure,
    "reduction": _parallel_reduction.measure,
    "local": _parallel_local_steps.measure,
    "precision": _parallel_precision.measure,
    "zero": _parallel_zero.measure,
    "context": _parallel_context.measure,
    "ahead": _parallel_ahead.measure,
    "experts": _parallel_experts.measure,
    "torchtitan": _parallel_titan.measure,
}


def main() -> int:
    """Run the chosen parts; return 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part; may be repeated")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--torchtitan", metavar="FOLDER", default="", help="where it is installed, if not here")
    arguments = parser.parse_args()
    parts = {name: functools.partial(part, arguments.quick) for name, part in PARTS.items()}
    parts["torchtitan"] = functools.partial(_parallel_titan.measure, arguments.quick, arguments.torchtitan)
    rows = run_parts(parts, arguments.only or PARTS)
    print_rows(rows, arguments.json)
    return int(any(row.met is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
