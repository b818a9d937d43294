"""The page on joining a site, typed command by command for each kind of site, with a real server and agent."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.follow_guide import ROOT, blocks
from tests.docs.terminal import Terminal
from tests.free_ports import free_ports
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.conftest import api_server
from tests.kubernetes.newer_server import NewerServer
from tests.ray.ray_cluster import RayCluster, missing_ray
from tests.slurm.conftest import running_cluster
from tests.slurm.slurm_cluster import SlurmCluster

__all__ = ["api_server"]

PAGE = ROOT / "docs" / "sites.md"


def follow(folder: Path, kind: str, changes: dict[str, str]) -> Terminal:
    """Do what the page says for a kind of site."""
    terminal = Terminal(folder, changes)
    desk = folder / "desk"
    desk.mkdir()
    try:
        for block in blocks(PAGE):
            text = block.text
            for old, new in changes.items():
                text = text.replace(old, new)
            if block.language == "yaml":
                head, _, rest = text.partition("\n")
                of_kind, _, name = head.removeprefix("# ").rpartition(": ")
                if of_kind in ("", kind):
                    (desk / name).write_text(rest)
            elif block.language == "console":
                for part in re.split(r"^(?=(?:pool|site)\$ )", text, flags=re.MULTILINE)[1:]:
                    side, _, line = part.partition("$ ")
                    command, _, output = line.partition("\n")
                    terminal.type_in(side, command, output)
    finally:
        terminal.end()
    return terminal


@pytest.fixture(scope="module")
def alpha(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Two nodes with four cards each."""
    yield from running_cluster("alpha", tmp_path_factory)


@pytest.fixture
def free_port() -> int:
    return free_ports(1)[0]


def _changes(port: int, folder: Path) -> dict[str, str]:
    """The server's port and state folder: the page keeps server and site on one machine, in one folder."""
    return {"8470": str(port), "--state server": f"--state {folder}/server", "=server/": f"={folder}/server/"}


@pytest.mark.slow
def test_the_page_takes_a_machine_into_the_pool_and_out_again(tmp_path: Path, free_port: int) -> None:
    """For processes of one machine."""
    follow(tmp_path, "local", _changes(free_port, tmp_path))


@pytest.mark.slow
def test_the_page_takes_a_slurm_cluster_into_the_pool_and_out_again(
    alpha: SlurmCluster, tmp_path: Path, free_port: int
) -> None:
    """For a real Slurm; afterwards it has no job of the pool."""
    follow(tmp_path, "slurm", _changes(free_port, tmp_path) | {"/etc/slurm/slurm.conf": str(alpha.conf)})
    assert alpha.run("squeue", "-h").strip() == ""


@pytest.mark.slow
def test_the_page_takes_a_kubernetes_cluster_into_the_pool_and_out_again(
    api_server: ApiServer, tmp_path: Path, free_port: int
) -> None:
    """For a real API server, with the rights of the agent's role alone; afterwards it has nothing of the pool."""
    server = NewerServer(api_server)
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(api_server.kubeconfig().read_text().replace(api_server.address, server.address))
    kubeconfig.chmod(0o600)
    cluster = {
        "/etc/isthmus/kubeconfig": str(kubeconfig),
        "nvidia.com/gpu.product: NVIDIA-H20": "example.com/chip: h20",
    }
    try:
        follow(tmp_path, "kubernetes", _changes(free_port, tmp_path) | cluster)
    finally:
        server.end()
    paths = ("/apis/batch/v1/jobs", "/api/v1/pods", "/api/v1/namespaces/isthmus/secrets")
    assert [api_server.api.get(path).json()["items"] for path in paths] == [[], [], []]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_takes_a_ray_cluster_into_the_pool_and_out_again(whole: bool, tmp_path: Path, free_port: int) -> None:
    """For a real Ray; afterwards it lists no job and has all its cards."""
    if missing_ray():
        pytest.skip(f"needs Ray: {missing_ray()}")
    if not whole:
        pytest.skip("a Ray of its own takes a minute of CPU time: --whole tries it, tests/ray a site and its parts")
    ray = RayCluster(Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp")), cards=4)
    try:
        ray.start()
        cluster = {"http://ray-head.example:8265": ray.address, "/opt/ray/bin/python": sys.executable}
        follow(tmp_path, "ray", _changes(free_port, tmp_path) | cluster)
        assert (ray.jobs(), ray.used_cards()) == ([], 0)
    finally:
        ray.end()


def test_every_command_of_the_page_is_one_of_the_two_sides() -> None:
    """A command that no test types would be a claim."""
    text = "".join(block.text for block in blocks(PAGE) if block.language == "console")
    assert text.count("$ ") == len(re.findall(r"^(?:pool|site)\$ ", text, flags=re.MULTILINE))
    kinds = [block.text.split(":")[0] for block in blocks(PAGE) if block.language == "yaml"]
    assert kinds == ["# pool.yaml\nversion", "# local", "# slurm", "# kubernetes", "# ray"]
