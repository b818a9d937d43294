"""`python -m benchmarks [NAME ...]`: run all or the named benchmarks; their tables go to docs/benchmarks.md.

A benchmark that is not run keeps the table it has. `--quick` runs a short form and writes nothing. Other
options are those of the benchmark named before them, and passed on.

  python -m benchmarks                           # all, one after another
  python -m benchmarks --quick control_core      # one, in short
  python -m benchmarks faults --runs 20          # one, with an option of its own
  python -m benchmarks.faults --help             # which options those are
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.table import COLUMNS, Row, markdown

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
HEADING = re.compile(r"^## `python -m benchmarks\.(\w+)`$", re.MULTILINE)


def names() -> list[str]:
    """Return the benchmarks: every module here that can be run."""
    return sorted(p.stem for p in HERE.glob("*.py") if "__main__" in p.read_text() and p.stem[0] != "_")


def described(name: str) -> str:
    """Return what a benchmark says of itself."""
    return (HERE / f"{name}.py").read_text(encoding="utf-8").split('"""')[1].strip()


def run(name: str, options: Sequence[str]) -> list[Row]:
    """Run one benchmark in a process of its own and return its rows."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [Row(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]


def head() -> str:
    """Return what stands above all tables."""
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    return (
        f"# Benchmarks\n\nPrinted by `make bench` (`python -m benchmarks`) on {machine}. "
        f"Compare within one table.\n\nColumns: {', '.join(COLUMNS)}. `ratio_text` is ours over the peer's."
    )


def sections(page: str) -> dict[str, str]:
    """Return the sections of the page by the name of their benchmark."""
    found = list(HEADING.finditer(page))
    ends = [one.start() for one in found[1:]] + [len(page)]
    return {one[1]: page[one.start() : end].strip() for one, end in zip(found, ends, strict=True)}


def measure(chosen: Sequence[str], options: Sequence[str], *, keep: bool) -> None:
    """Run the benchmarks named and print their tables; `keep` writes each into the page."""
    kept = sections(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
    for name in chosen:
        print(f"benchmarks.{name} ...", file=sys.stderr, flush=True)
        rows = run(name, options)
        print(markdown(rows), flush=True)
        if rows and keep:
            kept[name] = "\n\n".join([f"## `python -m benchmarks.{name}`", described(name), markdown(rows)])
            tables = [kept[one] for one in names() if one in kept]
            PAGE.write_text("\n\n".join([head(), *tables]) + "\n", encoding="utf-8")


def main(words: Sequence[str] | None = None) -> int:
    """Run what the words of the command line ask for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", usage="%(prog)s [-h] [--list] [--quick] [NAME ...] [OPTION ...]",
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("names", nargs="*", metavar="NAME", help="which to run (default: all)")
    parser.add_argument("--list", action="store_true", help="tell which there are, and run none")
    parser.add_argument("--quick", action="store_true", help="a short run; docs/benchmarks.md stays as it is")
    asked, passed_on = parser.parse_known_args(words)
    known = names()
    if unknown := sorted(set(asked.names) - set(known)):
        parser.error(f"no benchmark '{unknown[0]}'; there are {', '.join(known)}")
    if passed_on and not asked.names:
        parser.error(f"'{passed_on[0]}' is no option of all benchmarks: name the one it is for, before it")
    if asked.list:
        for name in asked.names or known:
            print(f"{name:16} {described(name).splitlines()[0].partition(' `python')[0].rstrip(':')}")
        return 0
    options = [*(["--quick"] if asked.quick else []), *passed_on]
    measure(asked.names or known, options, keep=not asked.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
