"""`python -m benchmarks [NAME ...]`: run all or the named benchmarks; their tables go to docs/benchmarks.md.

What is not run keeps the table it has. Options are passed on: `--quick` for a short run that writes nothing.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.table import COLUMNS, Row, markdown

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
HEADING = re.compile(r"^## `python -m benchmarks\.(\w+)`$", re.MULTILINE)


def names() -> list[str]:
    """Return the benchmarks: every module here that can be run."""
    return sorted(p.stem for p in HERE.glob("*.py") if "__main__" in p.read_text() and p.stem[0] != "_")


def run(name: str, options: list[str]) -> list[Row]:
    """Run one benchmark in a process of its own and return its rows."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [Row(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]


def head() -> str:
    """Return what stands above all tables."""
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    return (
        f"# Benchmarks\n\nPrinted by `make bench` (`python -m benchmarks`) on {machine}. "
        f"Compare within one table.\n\nColumns: {', '.join(COLUMNS)}. `ratio` is ours over the peer's."
    )


def sections(page: str) -> dict[str, str]:
    """Return the sections of the page by the name of their benchmark."""
    found = list(HEADING.finditer(page))
    ends = [one.start() for one in found[1:]] + [len(page)]
    return {one[1]: page[one.start() : end].strip() for one, end in zip(found, ends, strict=True)}


def main() -> int:
    """Run what is asked for, print it, and keep what a full run printed."""
    known = names()
    options = [word for word in sys.argv[1:] if word.startswith("-")]
    chosen = [word for word in sys.argv[1:] if not word.startswith("-")] or known
    if unknown := sorted(set(chosen) - set(known)):
        print(f"error: no benchmark '{unknown[0]}'; there are {', '.join(known)}", file=sys.stderr)
        return 2
    kept = sections(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
    for name in chosen:
        print(f"benchmarks.{name} ...", file=sys.stderr, flush=True)
        doc = (HERE / f"{name}.py").read_text(encoding="utf-8").split('"""')[1].strip()
        rows = run(name, options)
        print(markdown(rows), flush=True)
        if rows and "--quick" not in options:
            kept[name] = "\n\n".join([f"## `python -m benchmarks.{name}`", doc, markdown(rows)])
            tables = [kept[one] for one in known if one in kept]
            PAGE.write_text("\n\n".join([head(), *tables]) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
