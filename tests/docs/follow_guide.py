"""`follow_guide`: do what a guide of `docs/extend` says, block by block, in a copy of the repository.

A block's language says what happens with it:

- `python`, `yaml`, `json`: a new file. Its path is the first line's comment (`# src/new.py`), or in JSON, which has no
  comments, the line above the block names it: "`new.json` in `folder/`".
- `diff`: an edit. The first line is `--- path`; hunks are separated by `@@`, and the old text of each must occur in the
  file exactly once.
- `console`: commands after `$ `. Each must succeed. Lines after it are its output, where `...` matches any text.

Other blocks are only for the reader.
"""

from __future__ import annotations

import doctest
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
COPIED = (
    "src",
    "tests",
    "scripts",
    "docs",
    "pyproject.toml",
    "hatch_build.py",
    "mkdocs.yml",
    "README.md",
    "CHANGELOG.md",
)
COMMAND_TIMEOUT_S = 150

_BLOCK = re.compile(r"(?:(?P<above>[^\n]*)\n\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: the line above it, its language, its text."""

    above: str
    language: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page in order."""
    for match in _BLOCK.finditer(page.read_text(encoding="utf-8")):
        yield Block(match["above"] or "", match["language"], match["text"])


def copy_repository(folder: Path) -> Path:
    """Copy what a guide may edit or run to `folder`, and return it.

    Bytecode goes along: it names the time of its source, which the copy keeps, so that only edited files are compiled.
    """
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("*.pyc.*"))  # some are being written
        else:
            shutil.copy(source, folder / name)
    return folder


def follow_guide(page: Path, folder: Path) -> list[Path]:
    """Follow `page` in the copy at `folder`; return the Python files written, relative to it.

    Raises `AssertionError` with the block that cannot be followed.
    """
    written: list[Path] = []
    for block in blocks(page):
        if block.language == "console":
            for command, output in _commands(block.text):
                _run(folder, command, output)
            continue
        if block.language == "diff":
            written.append(_edit(folder, block.text))
        elif block.language in ("python", "yaml", "json"):
            written.append(_create(folder, block))
    return [file for file in written if file.suffix == ".py"]


def _create(folder: Path, block: Block) -> Path:
    if block.language == "json":
        name, parent = re.findall(r"`([\w.-]+\.json)` in `([\w/]+/)`", block.above)[-1]
        path = parent + name
    else:
        path = block.text.partition("\n")[0].removeprefix("# ")
    file = folder / path
    assert not file.exists(), f"the guide creates {path}, which exists"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(block.text, encoding="utf-8")
    return Path(path)


def _edit(folder: Path, text: str) -> Path:
    head, *lines = text.splitlines()
    path = head.removeprefix("--- ")
    content = (folder / path).read_text(encoding="utf-8")
    for hunk in "\n".join(lines).split("\n@@\n"):
        old = "".join(f"{line[1:]}\n" for line in hunk.splitlines() if not line.startswith("+"))
        new = "".join(f"{line[1:]}\n" for line in hunk.splitlines() if not line.startswith("-"))
        assert content.count(old) == 1, f"{path} has {content.count(old)} times:\n{old}"
        content = content.replace(old, new)
    (folder / path).write_text(content, encoding="utf-8")
    return Path(path)


def _commands(text: str) -> Iterator[tuple[str, str]]:
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def _run(folder: Path, command: str, expected: str) -> None:
    environment = os.environ | {
        "PYTHONPATH": f"{folder / 'src'}{os.pathsep}{folder}",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONDONTWRITEBYTECODE": "",
    }
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=COMMAND_TIMEOUT_S,
    )  # fmt: skip
    got = "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())
    assert done.returncode == 0, f"$ {command}\n{got}"
    matches = not expected or doctest.OutputChecker().check_output(expected, got, doctest.ELLIPSIS)
    assert matches, f"$ {command}\nexpected:\n{expected}\ngot:\n{got}"
