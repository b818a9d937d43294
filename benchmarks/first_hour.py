"""The first hour of a new user: set-up, several machines, mistakes, shared folders, the timeline, and equal losses.

`clone` clones this commit and runs `make demo` in the clone, which sets up `.venv` with pip's cache, up to the first
loss on the screen. `machines` types the commands of the guide for several machines on three network namespaces (root).
`mistakes` makes each mistake of `_first_hour_mistakes.py` against a real pool: its refusal must name the value and
the next step, and no job may hold a chip. `pairs` submits pairs of jobs that share a folder, a name or an output.
`timeline` compares the report's messages between clusters with the record of the emulated links. `equality`
compares the losses of real workers with a plain loop of torch and transformers.

  python -m benchmarks.first_hour                       # all
  python -m benchmarks.first_hour --quick               # a sample of mistakes, pairs, steps and models; no clone
  python -m benchmarks.first_hour --only mistakes       # one part
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import yaml

from benchmarks._first_hour_equality import MODELS, compare
from benchmarks._first_hour_mistakes import MISTAKES
from benchmarks._first_hour_pairs import emulated_pool, make_pairs, run_pairs, write_inputs
from benchmarks._first_hour_refusals import make_all
from benchmarks._first_hour_timeline import ATTEMPTS, compare_timeline
from benchmarks._first_hour_timeline import rows as timeline_rows
from benchmarks.table import ROOT, Row, print_rows
from isthmus.cli.demo.demo_pool import DemoPool
from isthmus.core.pool import Pool

FIRST_LOSS_S = 75.0
FIRST_LOSS = re.compile(r"step \d+/\d+ .*loss \d")
"""The line of a step in the output of `isthmus demo`."""

CLONE_LIMIT_S = 900.0
TOLERANCE = 1e-6
QUICK_MISTAKES = 12


def clone_rows(folder: Path, *, quick: bool) -> list[Row]:
    """Return the time from `git clone` to the first loss, in a session of its own."""
    if quick:
        return []
    begun_s, begun_cpu_s = time.monotonic(), _children_cpu_s()
    subprocess.run(["git", "clone", "--quiet", ROOT, folder / "isthmus"], check=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    process = subprocess.Popen(
        ["make", "demo"], cwd=folder / "isthmus", env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    found_s = _seconds_to_loss(process, begun_s)
    for one in [*psutil.Process(process.pid).children(recursive=True), process]:
        one.terminate()
    process.wait(timeout=60)
    cpu_s = _children_cpu_s() - begun_cpu_s
    what = f"git clone to the first loss of `make demo`, packages cached ({cpu_s:.0f} s of CPU)"
    return [Row(what=what, ours=found_s, unit="s", target=f"at most {FIRST_LOSS_S:g} s", met=found_s <= FIRST_LOSS_S)]


def _seconds_to_loss(process: subprocess.Popen[str], begun_s: float) -> float:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if FIRST_LOSS.search(line):
            return time.monotonic() - begun_s
        if time.monotonic() - begun_s > CLONE_LIMIT_S:
            break
    raise RuntimeError("the demo has shown no loss:\n" + "".join(lines[-30:]))


def _children_cpu_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def machines_rows(_folder: Path, *, quick: bool) -> list[Row]:
    """Return whether every command of the guide works as printed; the test of the page types them."""
    del quick
    test = ROOT / "tests" / "docs" / "test_several_machines.py"
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test)]
    begun_s = time.monotonic()
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    from tests.docs.test_several_machines import commands

    count, skipped = len(commands()), " skipped" in done.stdout
    what = f"guide for several machines, {time.monotonic() - begun_s:.0f} s: commands"
    works = done.returncode == 0 and not skipped
    note = "at most 10, all as printed" + (" (root and namespaces are missing here)" if skipped else "")
    return [Row(what=what, ours=count, unit="", target=note, met=None if skipped else works and count <= 10)]


def mistakes_rows(folder: Path, *, quick: bool) -> list[Row]:
    """Return how many mistakes are refused before chips are held, and how many refusals say what, which and next."""
    chosen = tuple(random.Random(1).sample(MISTAKES, QUICK_MISTAKES)) if quick else MISTAKES
    answers, with_chips, seconds = make_all(chosen, folder)
    for answer in answers:
        if answer.fault:
            print(f"{answer.mistake.name}: {answer.fault}\n{answer.text}", file=sys.stderr, flush=True)
    refused = sum(answer.status != 0 for answer in answers) - len(with_chips)
    clear = sum(not answer.fault for answer in answers)
    total, pace = len(answers), f"{seconds / len(answers):.1f} s each"
    return [
        Row(what=f"{total} mistakes: refused before chips are held, {pace}", ours=refused, unit="", target=f"{total}",
            met=refused == total),
        Row(what=f"{total} mistakes: the refusal says what, which value, what next", ours=clear, unit="",
            target=f"{total}", met=clear == total),
    ]  # fmt: skip


def pairs_rows(folder: Path, *, quick: bool) -> list[Row]:
    """Return how many second jobs of a pair used or overwrote the first one's files."""
    pairs, trained = (make_pairs(8), 0) if quick else (make_pairs(), 3)
    write_inputs(folder)
    (folder / "pool.yaml").write_text(yaml.safe_dump(emulated_pool()))
    with DemoPool(folder, Pool.model_validate(emulated_pool())) as pool:
        results = list(run_pairs(pool, pairs, trained))
    wrong = [one for one in results if one.silent_reuse]
    for one in wrong:
        print(f"{one.pair.name}: {one.silent_reuse}", file=sys.stderr, flush=True)
    refused = sum(bool(one.refusal) for one in results)
    what = f"{len(results)} pairs of jobs that share a folder, a name or an output, {refused} refused: silent reuse"
    return [Row(what=what, ours=len(wrong), unit="", target="0", met=not wrong)]


def timeline_part(_folder: Path, *, quick: bool) -> list[Row]:
    """Return the errors of the report's messages; repeated while other load disturbs every step."""
    for _ in range(ATTEMPTS):
        found = compare_timeline(3 if quick else 9)
        if found.num_calm:
            break
    return timeline_rows(found)


def equality_rows(folder: Path, *, quick: bool) -> list[Row]:
    """Return the largest relative difference of losses to the plain loop, of each model."""
    models = tuple(MODELS)[:1] if quick else tuple(MODELS)
    found = list(compare(folder, models))
    rows = []
    for model in models:
        largest = {one.layout: one.largest for one in found if one.model == model}
        worst = max(largest.values())
        what = f"losses of {model} under {', '.join(largest)} beside a plain torch loop: largest relative difference"
        rows.append(Row(what=what, ours=worst, unit="", target=f"at most {TOLERANCE:g}", met=worst <= TOLERANCE))
    return rows


PARTS: dict[str, Callable[..., list[Row]]] = {
    "clone": clone_rows,
    "machines": machines_rows,
    "mistakes": mistakes_rows,
    "pairs": pairs_rows,
    "timeline": timeline_part,
    "equality": equality_rows,
}


def main() -> int:
    """Run the parts and print their rows; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="samples instead of all cases; no clone")
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part; may be repeated")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for name in arguments.only or PARTS:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name} ...", file=sys.stderr, flush=True)
            rows += PARTS[name](Path(folder), quick=arguments.quick)
    print_rows(rows, arguments.json)
    return int(any(row.met is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
