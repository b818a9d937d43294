"""`python -m benchmarks`: run every benchmark and write the table of all rows to docs/benchmarks.md.

Options are passed on: `--quick` for a short run (which writes nothing).
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

from benchmarks.table import COLUMNS, Row, markdown

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"


def names() -> list[str]:
    """Return the benchmarks: every module here that can be run."""
    return sorted(p.stem for p in HERE.glob("*.py") if "__main__" in p.read_text() and p.stem[0] != "_")


def run(name: str, options: list[str]) -> list[Row]:
    """Run one benchmark in a process of its own and return its rows."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [Row(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> int:
    """Run all, print all, and keep what a full run printed."""
    options = sys.argv[1:]
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    parts = [
        "# Benchmarks",
        f"Printed by `make bench` (`python -m benchmarks`) on {machine}. Compare within one table.",
        "Columns: " + ", ".join(COLUMNS) + ". `ratio` is ours over the peer's.",
    ]
    for name in names():
        print(f"benchmarks.{name} ...", file=sys.stderr, flush=True)
        doc = (HERE / f"{name}.py").read_text(encoding="utf-8").split('"""')[1].strip()
        table = markdown(run(name, options))
        print(table, flush=True)
        parts += [f"## `python -m benchmarks.{name}`", doc, table]
    if "--quick" not in options:
        PAGE.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
