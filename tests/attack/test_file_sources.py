"""Attacks by users on what an agent copies for their jobs from other sites: links at either end, paths of commands."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from isthmus.agent.files.file_transfer import CommandSource, FolderSource
from isthmus.agent.files.site_storage import SiteStorage
from isthmus.core.errors import UnavailableError
from isthmus.core.owner.owner_policy import OwnerPolicy

pytestmark = pytest.mark.attack

RULES = OwnerPolicy.model_validate({"storage": {"roots": [{"path": "/{user}"}]}}).storage


def fetch(source: FolderSource, path: str, target: Path, user: str = "ann") -> bool:
    """Copy a path for a job of `user`, as the agent does."""
    storage = SiteStorage(RULES, target.parents[1])
    return source.fetch(path, target, lambda *_: None, lambda place: storage.may_read(place, user))


@pytest.fixture
def north(tmp_path: Path) -> Path:
    """The storage of another site, mounted here, with files of ann and bob; beside it a secret of this agent."""
    for name in ("ann/model", "bob/model"):
        (tmp_path / "north" / name).mkdir(parents=True)
        (tmp_path / "north" / name / "weights").write_text(f"of {name[:3]}")
    (tmp_path / "token").write_text("secret")
    return tmp_path / "north"


@pytest.mark.parametrize("leads_to", ["token", "north/bob/model/weights"])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_link_at_the_source_gives_nothing_of_others(tmp_path: Path, north: Path, leads_to: str, kind: str) -> None:
    """Ann puts a link to a file of the agent or of bob into a folder of hers, and has it copied to another site."""
    victim, path = tmp_path / leads_to, "/ann/model"
    if kind == "file":
        (north / "ann" / "model" / "extra").symlink_to(victim)
    else:
        (north / "ann" / "door").symlink_to(victim.parent)
        path = f"/ann/door/{victim.name}"
    target = tmp_path / "south" / "ann" / "copy"
    with pytest.raises(UnavailableError, match="may not read"):
        fetch(FolderSource(north), path, target)
    assert not target.exists()


def test_a_link_inside_ones_own_storage_is_copied(tmp_path: Path, north: Path) -> None:
    """Folders of downloaded models consist of links to files beside them."""
    (north / "ann" / "snapshot").mkdir()
    (north / "ann" / "snapshot" / "weights").symlink_to("../model/weights")
    target = tmp_path / "south" / "ann" / "snapshot"
    assert fetch(FolderSource(north), "/ann/snapshot", target)
    assert (target / "weights").read_text() == "of ann"
    assert not (target / "weights").is_symlink()


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_nothing_is_written_through_what_a_user_has_put_at_the_target(tmp_path: Path, north: Path, kind: str) -> None:
    """Ann foresees the name of an unfinished copy; the agent may be root."""
    victim, target = tmp_path / "victim", tmp_path / "south" / "ann" / "model"
    victim.write_text("mine")
    target.mkdir(parents=True)
    if kind == "link":
        (target / "weights.part").symlink_to(victim)
    else:
        os.mkfifo(target / "weights.part")
    assert fetch(FolderSource(north), "/ann/model", target)
    assert victim.read_text() == "mine"
    assert (target / "weights").read_text() == "of ann"


@pytest.mark.parametrize(
    "path",
    ["/m/$(touch x)", "/m`id`", "/m;id", "/m|id", "/m&id", "/m>x", "/m\nid", "/../etc/shadow", "/a/../../b", "/-e sh",
     "/ -e", "/m\x1b[2J", "/m'", '/m"', "/m\\", "/~(x)"],
)  # fmt: skip
def test_no_path_of_a_job_reaches_a_shell_or_leaves_the_source(tmp_path: Path, path: str) -> None:
    """rsync and scp hand what follows the host to a shell there; a path that begins with `-` is an option."""
    run = CommandSource((sys.executable, "-c", "open('ran', 'w')", "{path}", "{target}"))
    with pytest.raises(UnavailableError, match="not handed to the copy command"):
        run.fetch(path, tmp_path / "m", lambda *_: None)
