"""Files and bodies that stand for far more than they spell out: each costs a bounded second and ends as an error."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus.client.client_settings import context_path, read_context, read_token
from isthmus.core.bounded_file import MAX_FILE_BYTES, read_within
from isthmus.core.errors import FileError
from isthmus.core.files.user_files import load_job, load_plan, load_policy, load_pool
from isthmus.core.files.yaml_lines import MAX_DEPTH, MAX_VALUES, read_yaml
from isthmus.core.model import read_config
from tests.cli.fake_server import FakeServer, run

pytestmark = pytest.mark.attack

LIMIT_CPU_S = 3.0
"""Each takes below 0.5 s on an idle CPU; this leaves room for a slow one."""
MIB = 2**20


def merges(levels: int) -> str:
    """Return maps that merge the one before ten times."""
    lines = ["m0: &m0 {" + ", ".join(f"k{one}: 1" for one in range(10)) + "}"]
    lines += [f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 10)}], z: 1}}" for n in range(1, levels)]
    return "\n".join(lines)


def laughs(levels: int) -> str:
    """Return lists of nine aliases of the line before ("billion laughs", CVE-2003-1564)."""
    lines = ["a0: &a0 [lol]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join(lines)


BOMBS: dict[str, Callable[[], str]] = {
    "a billion values by aliases": lambda: laughs(12),
    "merge keys": lambda: merges(9),
    "a long text, repeated by aliases": lambda: f'a: &a "{"x" * MIB}"\nb: [{", ".join(["*a"] * 9_999)}]',
    "an anchor within itself": lambda: "a: &a [*a]",
    "a chain of anchors": lambda: "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 5000)),
    "deep lists": lambda: "a: " + "[" * 200_000,
    "deep maps": lambda: "a: " + "{a: " * 100_000,
    "deep blocks": lambda: "\n".join(" " * n + "a:" for n in range(2000)),
    "deep entries": lambda: "a:\n" + "- " * 200_000,
    "deep keys": lambda: "? " * 100_000,
    "a million values": lambda: "a: [" + "1," * 1_000_000 + "]",
    "a million fields": lambda: "".join(f"k{n}: v\n" for n in range(1_000_000)),
    "a number of a million digits": lambda: "steps: " + "9" * MIB,
    "a number of base 60": lambda: "steps: 1" + ":59" * MIB,
    "a text of 15 MiB": lambda: 'name: "' + "x" * (15 * MIB) + '"',
    "a field name of 15 MiB": lambda: '"' + "x" * (15 * MIB) + '": 1',
    "15 MiB of escapes": lambda: 'name: "' + "\\x41" * (3 * MIB) + '"',
    "15 MiB of comment": lambda: "#" * (15 * MIB) + "\nname: x",
    "15 MiB of blanks": lambda: " " * (15 * MIB) + "\nname: x",
    "15 million lines": lambda: "\n" * (15 * MIB) + "name: x",
    "a file of 100 MB": lambda: "x" * 100_000_000,
    "two documents": lambda: "name: a\n---\nname: b",
    "a field twice": lambda: "name: a\nname: b",
    "a Python object": lambda: "name: !!python/object/apply:os.system [echo]",
    "a tag without a value": lambda: "name: !!bool maybe",
    "a timestamp of a list": lambda: "name: !!timestamp [1]",
    "a tag of one's own": lambda: "name: !evil x",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_an_error_of_the_file_within_a_second(bomb: str, tmp_path: Path) -> None:
    """CPU time, the growth of memory and the length of the message are bounded; no other exception leaves."""
    file = tmp_path / "job.yaml"
    file.write_text(BOMBS[bomb]())
    before_kib, began_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(FileError) as caught:
        load_job(file)
    assert time.process_time() - began_s < LIMIT_CPU_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 400 * 1024
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("load", [load_pool, load_policy, load_plan, load_job])
def test_every_user_file_has_the_same_limits(load: Callable[[Path], object], tmp_path: Path) -> None:
    """Pool, policy and plan of another owner, and a job of another user."""
    file = tmp_path / "file.yaml"
    for text in (laughs(12), "a: " + "[" * 200_000, "a: [" + "1," * (MAX_VALUES + 1) + "]"):
        file.write_text(text)
        with pytest.raises(FileError):
            load(file)


SAMPLED = ("a billion values by aliases", "deep keys", "a million fields", "a file of 100 MB", "a Python object")
"""Bombs of each limit, for other readers of such files."""


@pytest.mark.parametrize("bomb", BOMBS)
def test_the_context_file_of_the_client_has_the_same_limits(bomb: str, whole: bool, tmp_path: Path) -> None:
    """It is read by every command: a bomb in it is an error of that file, within the same bounds."""
    if not whole and bomb not in SAMPLED:
        pytest.skip("one of the bombs that --whole tries here; in a job file all are tried")
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    file = context_path(environ)
    file.parent.mkdir()
    file.write_text(BOMBS[bomb]())
    before_kib, began_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(FileError, match=r"context\.yaml"):
        read_context(environ)
    assert time.process_time() - began_s < LIMIT_CPU_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 400 * 1024


def test_an_empty_context_file_has_no_fields(tmp_path: Path) -> None:
    """A file of comments is one without settings, not an error."""
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    context_path(environ).parent.mkdir()
    for text in ("", "# no settings yet\n"):
        context_path(environ).write_text(text)
        assert read_context(environ) == {}


def test_a_file_without_an_end_is_read_to_its_limit_only() -> None:
    """A device in place of a token, a configuration or a context file takes no memory."""
    device = Path("/dev/zero")
    with pytest.raises(FileError, match="larger than 4,096 bytes"):
        read_token(device)
    with pytest.raises(FileError, match="larger than 10 bytes"):
        read_within(device, 10)


def test_a_configuration_of_a_model_has_a_limit(tmp_path: Path) -> None:
    """Its reader stops at 16 MiB; the message names the file."""
    file = tmp_path / "config.json"
    with file.open("wb") as stream:
        stream.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(FileError, match=r"config\.json: is larger than 16 MiB"):
        read_config(file)


def test_the_command_line_says_which_file(tmp_path: Path) -> None:
    """Status 2, the file and what to do; nothing is sent."""
    file = tmp_path / "job.yaml"
    file.write_text(laughs(12))
    server = FakeServer()
    done = run(server, "submit", file)
    assert (done.status, server.seen) == (2, [])
    assert "job.yaml" in done.err
    assert "replace anchors by their values" in done.err


def test_files_within_the_limits_are_read(tmp_path: Path) -> None:
    """Depth, values and aliases of real files, and a text of many lines."""
    file = tmp_path / "file.yaml"
    nested = "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    values = ", ".join(["1"] * (MAX_VALUES - MAX_DEPTH - 100))
    file.write_text(
        f"deep: {nested}\nmany: [{values}]\nbase: &base {{a: 1}}\nmore: {{<<: *base, b: 2}}\ntext: |\n  {'x ' * 9999}\n"
    )
    document, lines = read_yaml(file)
    assert document["more"] == {"a": 1, "b": 2}
    assert len(document["many"]) == MAX_VALUES - MAX_DEPTH - 100
    assert lines["more",] == 4
    assert file.stat().st_size < MAX_FILE_BYTES
