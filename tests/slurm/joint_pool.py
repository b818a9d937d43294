"""`JointPool`: a real server, and agents on real Slurm clusters and other sites; jobs across all start a program.

`policy` is that of the owners of the Slurm clusters.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isthmus.agent import AgentConfig, run_agent
from isthmus.control.server.run_server import ServerConfig, ServerInfo, run_server
from isthmus.core.job import Job
from isthmus.core.model import load_model
from isthmus.core.owner.owner_policy import OwnerPolicy
from isthmus.core.owner.site_file import NodeSelector, SiteFile
from isthmus.core.pool import Cluster, Link, NodeGroup, Owner, Pool
from isthmus.core.views.api_views import Submission
from tests.control.processes import STAND_IN, RealPool, until
from tests.e2e.site import make_files, make_job
from tests.ray.ray_cluster import RayCluster
from tests.slurm.samples import cluster_of
from tests.slurm.slurm_cluster import SlurmCluster

NOTE_START = (
    "sh", "-c", 'for f; do :; done; date +%s.%N > "$f/up.tmp"; mv "$f/up.tmp" "$f/up"; exec "$@"', "note",
)  # fmt: skip
"""Before a worker's program: notes when its first line ran."""


@dataclass(frozen=True, kw_only=True)
class JointSite:
    """A site as its agent has it: `pool.yaml` and `site.yaml`; its cards are cores of this machine."""

    cluster: Cluster
    file: SiteFile
    policy: OwnerPolicy = field(default_factory=OwnerPolicy)


def site_of(cluster: Cluster, file: SiteFile, policy: OwnerPolicy | None = None) -> JointSite:
    """Return a site with an owner of its own."""
    (group,) = cluster.node_groups
    group = group.model_copy(update={"chip": "CPU-core"})
    owner = f"owner-{cluster.name}"
    whole = Cluster(name=cluster.name, owner=owner, node_groups=(group,))
    return JointSite(cluster=whole, file=file, policy=policy or OwnerPolicy())


def slurm_site(slurm: SlurmCluster, policy: OwnerPolicy | None = None) -> JointSite:
    """Return the site of a Slurm cluster."""
    options = {"preempting_partition": "high", "config": str(slurm.conf)}
    groups = {"h20": NodeSelector(partition="normal", resource="gpu")}
    return site_of(cluster_of(slurm), SiteFile(kind="slurm", node_groups=groups, options=options), policy)


def ray_site(
    ray: RayCluster, policy: OwnerPolicy | None = None, node_images: Mapping[str, str] | None = None
) -> JointSite:
    """Return the site of both nodes of a Ray cluster, `north`; `node_images` are the options of images there."""
    group = NodeGroup(name="h20", chip="H20", nodes=2, chips_per_node=ray.num_cards)
    options = {"address": ray.address, "python": sys.executable, "timeout_s": 60, **(node_images or {})}
    site = SiteFile(kind="ray", options=options)
    return site_of(Cluster(name="north", owner="o", node_groups=(group,)), site, policy)


def local_site(policy: OwnerPolicy | None = None) -> JointSite:
    """Return the site of one card of this machine, `south`."""
    group = NodeGroup(name="h20", chip="H20", nodes=1, chips_per_node=1)
    return site_of(Cluster(name="south", owner="o", node_groups=(group,)), SiteFile(kind="local"), policy)


def pool_of(sites: Mapping[str, JointSite]) -> Pool:
    """Return a pool of the sites, 10 ms and 1 Gbit/s apart."""
    clusters = tuple(site.cluster for site in sites.values())
    links = tuple(
        Link(source=a, target=b, bandwidth_gbps=1, delay_ms=10) for a in sites for b in sites if a != b
    )  # fmt: skip
    return Pool(owners=tuple(Owner(name=one.owner) for one in clusters), clusters=clusters, links=links)


class JointPool(RealPool):
    """The processes of a pool over `slurms` and `others`, by name; each may be killed and started again."""

    def __init__(
        self, folder: Path, slurms: Mapping[str, SlurmCluster], command: Sequence[str] = (*NOTE_START, *STAND_IN),
        others: Mapping[str, JointSite] | None = None, policy: OwnerPolicy | None = None,
    ) -> None:  # fmt: skip
        self.sites = {name: slurm_site(slurm, policy) for name, slurm in slurms.items()} | dict(others or {})
        self.folder, self.port, self.url, self.pool = folder, 0, "", pool_of(self.sites)
        self.slurms, self._command, self.processes = dict(slurms), tuple(command), {}
        make_files(folder)
        self.start_server()
        self.user = self.create_token("user", "ann")
        self._owners = {site.name: self.create_token("owner", site.owner) for site in self.pool.clusters}
        for site in self.pool.clusters:
            self.start(site.name)

    def start_server(self, _crash: tuple[str, int] = ("", 0)) -> None:
        """Start the server with its own planner."""
        url = self.folder / "server" / "url"
        url.unlink(missing_ok=True)
        self._launch("server", serve, self.folder / "server", self.port, self.pool)
        until(url.exists, "the server listens")
        self.url = url.read_text()
        self.port = int(self.url.rpartition(":")[2])

    def start(self, name: str, crash: tuple[str, int] = ("", 0)) -> None:
        """Start the server or the agent of a cluster, with what its last life left."""
        if name == "server":
            self.start_server(crash)
            return
        site = self.sites[name]
        self._launch(name, act, self.url, self._owners[name], site, self.folder / name, self._command)

    def joint_job(self, name: str, **changes: Any) -> Job:
        """Return a job of as many stages as the pool has cards, so that no site holds it alone.

        It learns slowly: the rounding of another order of sums, which each update amplifies, stays below 1e-6.
        """
        num_cards = sum(group.num_chips for site in self.pool.clusters for group in site.node_groups)
        job = make_job(self.folder, name, **({"parallel": {"pp": num_cards, "dp": 1}} | changes))
        slow = job.training.model_copy(update={"learning_rate": 3e-4})
        return job.model_copy(update={"training": slow})

    def submit_joint(self, job: Job) -> str:
        """Submit a job; return its id."""
        body = Submission(job=job, model=load_model(job.model), key=job.name)
        answer = self.call("POST", "/v1/jobs", body.model_dump(mode="json"))
        assert answer is not None
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    def ups(self, job: str, attempt: int = 1) -> list[float]:
        """Return when the ranks of an attempt began, in seconds since the epoch, as far as they have."""
        files = self.folder.glob(f"*/runs/{job}/{attempt}/rank-*/up")
        return sorted(float(file.read_text()) for file in files)


def serve(state: Path, port: int, pool: Pool) -> None:
    """Be a server that notes its URL in `<state>/url`."""

    def announce(listening: ServerInfo) -> None:
        (state / "url.tmp").write_text(listening.url)
        (state / "url.tmp").replace(state / "url")

    run_server(ServerConfig(state=state, port=port, pool=pool), announce)


def act(url: str, token: str, site: JointSite, state: Path, command: tuple[str, ...]) -> None:
    """Be the agent of a site."""
    run_agent(
        AgentConfig(
            server=url, token=token, cluster=site.cluster, state=state, site=site.file, worker_command=command,
            policy=site.policy,
        )
    )  # fmt: skip
