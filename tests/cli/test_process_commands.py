"""Long-lived commands: what they check before they start; how they run is tested beside server and agent."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from isthmus.cli.commands.process_setup import import_extra
from isthmus.core.errors import InputError
from tests.cli.fake_server import run

POOL = """
clusters:
  - {name: a, owner: o, node_groups: [{chip: H20, nodes: 1, chips_per_node: 1}]}
  - {name: b, owner: o, node_groups: [{chip: H20, nodes: 1, chips_per_node: 1}]}
"""


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """A pool of two clusters without links."""
    (tmp_path / "pool.yaml").write_text(POOL)
    return tmp_path / "pool.yaml"


class Absent(importlib.abc.MetaPathFinder):
    """Makes a package look as though it were not installed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.split(".")[0] == self._name:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


@pytest.fixture
def without_colorsys() -> Iterator[None]:
    """A package that is absent."""
    known = sys.modules.pop("colorsys", None)
    sys.meta_path.insert(0, Absent("colorsys"))
    yield
    del sys.meta_path[0]
    if known is not None:
        sys.modules["colorsys"] = known


@pytest.mark.usefixtures("without_colorsys")
def test_a_missing_extra_names_the_command_that_installs_it() -> None:
    """The base install has neither fastapi nor psutil; the error says which extra brings them."""
    with pytest.raises(InputError, match="colorsys") as caught:
        import_extra("colorsys", "server")
    assert caught.value.hint == "pip install 'isthmus[server]'"


def test_a_mistake_of_our_own_is_not_taken_for_a_missing_extra() -> None:
    """A module of Isthmus that does not exist is a bug and stays one."""
    with pytest.raises(ModuleNotFoundError):
        import_extra("isthmus.no_such_module", "server")


def test_an_agent_needs_a_token(pool: Path, tmp_path: Path) -> None:
    """Without one it does not start (exit 4), and leaves no state folder."""
    words = ("agent", "--pool", pool, "--cluster", "a", "--state", tmp_path / "st")
    done = run(None, *words, environ={"ISTHMUS_TOKEN": ""})
    assert done.status == 4
    assert "isthmus token create --owner" in done.err
    assert not (tmp_path / "st").exists()


@pytest.mark.parametrize(("named", "status"), [((), 2), (("--cluster", "c"), 5)])
def test_an_agent_must_know_its_cluster(pool: Path, tmp_path: Path, named: tuple[str, ...], status: int) -> None:
    """One of several is said; one that is not there is answered with those that are."""
    done = run(None, "agent", "--pool", pool, "--state", tmp_path / "st", *named)
    assert done.status == status
    assert "a" in done.err
    assert not (tmp_path / "st").exists()


def test_an_agent_does_not_send_its_token_unencrypted(pool: Path, tmp_path: Path) -> None:
    """As with users' commands, beyond loopback a token needs https."""
    words = (
        "agent",
        "--pool",
        pool,
        "--cluster",
        "a",
        "--state",
        tmp_path / "st",
        "--server",
        "http://10.0.0.1",
    )
    assert run(None, *words).status == 2


@pytest.mark.parametrize("ports", ["41000", "a-b", "-1-5", "41100-41000", "80-90", "1-2-3", "70000-70001", "²-³"])
def test_an_agent_refuses_what_is_no_range_of_ports(pool: Path, tmp_path: Path, ports: str) -> None:
    """The value is repeated with an example, before anything is made."""
    words = ("agent", "--pool", pool, "--cluster", "a", "--state", tmp_path / "st", f"--ports={ports}")
    done = run(None, *words, environ={"ISTHMUS_TOKEN": "t"})
    assert done.status == 2
    assert ports in done.err
    assert "41000-41100" in done.err
    assert not (tmp_path / "st").exists()


def test_links_need_a_pool_with_links(pool: Path, tmp_path: Path) -> None:
    """A pool without any is answered before a port is opened."""
    assert run(None, "links", pool, "--state", tmp_path / "st").status == 2
    assert run(None, "links", tmp_path / "none.yaml", "--state", tmp_path / "st").status == 2
