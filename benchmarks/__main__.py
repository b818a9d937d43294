"""`python -m benchmarks [NAME ...]`: run all or the named benchmarks; their tables go to docs/benchmarks.

A benchmark that is not run keeps the table it has, and so does a part that `--only` leaves out. `--quick` runs a short
form and writes nothing. Other options belong to the benchmark named before them and are passed on. The exit status is 1
when a target is missed or a benchmark fails; the others run all the same.

  python -m benchmarks                           # all, one after another
  python -m benchmarks --quick control_core      # one, in short
  python -m benchmarks faults --runs 20          # one, with an option of its own
  python -m benchmarks trust --only links        # one part of one
  python -m benchmarks.faults --help             # the options of one
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence

from benchmarks.pages import BENCHMARKS, description_of, read_tables, updated_table, write_pages
from benchmarks.table import Row, markdown, printed_at


def names() -> list[str]:
    """Return the benchmarks: every module here that can be run."""
    return sorted(p.stem for p in BENCHMARKS.glob("*.py") if "__main__" in p.read_text() and p.stem[0] != "_")


Rows = tuple[list[Row], bool]
"""The rows of a benchmark, and whether it ran to its end."""


def run(name: str, options: Sequence[str]) -> Rows:
    """Run one benchmark in a process of its own; return its rows, and whether it ran to its end."""
    return run_command([sys.executable, "-m", f"benchmarks.{name}", "--json", *options])


def run_command(command: Sequence[str]) -> Rows:
    """Run a command that prints rows as JSON.

    A benchmark that missed a target exits with status 1, as one that fails does; only the former has such a row.
    """
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    rows = [Row(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
    missed = any(row.met is False for row in rows)
    return rows, done.returncode == 0 or (done.returncode == 1 and missed)


def stamp() -> str:
    """Return the line below a kept table: the commit, the machine, and its load average of the run's last minute."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    machine += f", load average {os.getloadavg()[0]:.0f}"
    return f"{printed_at().rstrip('.')} on {machine}."


def measure(
    chosen: Sequence[str],
    options: Sequence[str],
    *,
    keep: bool,
    run: Callable[[str, Sequence[str]], Rows] = run,
) -> int:
    """Run the named benchmarks and print their tables; `keep` writes each into its page.

    Returns the exit status: 1 when a target is missed or a benchmark fails. A failed one leaves its table as it is.
    """
    printed_at()  # before the first run: what is edited meanwhile is not measured
    tables, status = read_tables(), 0
    for name in chosen:
        print(f"benchmarks.{name} ...", file=sys.stderr, flush=True)
        rows, ended = run(name, options)
        print(f"{markdown(rows)}\n\n{printed_at()}", flush=True)
        if not ended:
            print(f"error: benchmarks.{name} failed; its table stays as it is", file=sys.stderr, flush=True)
        if not ended or any(row.met is False for row in rows):
            status = 1
        if rows and ended and keep:
            tables[name] = updated_table(tables.get(name, ""), rows, stamp())
            write_pages(tables)
    return status


def main(words: Sequence[str] | None = None, measure: Callable[..., int] = measure) -> int:
    """Run what the words of the command line ask for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", usage="%(prog)s [-h] [--list] [--render] [--quick] [NAME ...] [OPTION ...]",
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("names", nargs="*", metavar="NAME", help="which to run (default: all)")
    parser.add_argument("--list", action="store_true", help="tell which there are, and run none")
    parser.add_argument("--quick", action="store_true", help="a short run; the pages stay as they are")
    parser.add_argument("--render", action="store_true", help="write the pages again, and run none")
    asked, passed_on = parser.parse_known_args(words)
    known = names()
    if unknown := sorted(set(asked.names) - set(known)):
        parser.error(f"no benchmark '{unknown[0]}'; there are {', '.join(known)}")
    if passed_on and not asked.names:
        parser.error(f"'{passed_on[0]}' is no option of all benchmarks: name the one it is for, before it")
    if asked.list:
        for name in asked.names or known:
            print(f"{name:16} {description_of(name).splitlines()[0].partition(' `python')[0].rstrip(':')}")
        return 0
    if asked.render:
        write_pages(read_tables())
        return 0
    options = [*(["--quick"] if asked.quick else []), *passed_on]
    return measure(asked.names or known, options, keep=not asked.quick)


if __name__ == "__main__":
    sys.exit(main())
