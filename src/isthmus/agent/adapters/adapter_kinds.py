"""`make_adapter`: the adapter of a site's kind; further kinds are entry points of the group `isthmus.adapters`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from isthmus.agent.adapters.kubernetes.api_access import read_access
from isthmus.agent.adapters.kubernetes.kubernetes_adapter import KubernetesAdapter
from isthmus.agent.adapters.kubernetes.kubernetes_client import KubernetesClient
from isthmus.agent.adapters.kubernetes.kubernetes_site import KubernetesSite
from isthmus.agent.adapters.kubernetes.render_kubernetes import render_kubernetes
from isthmus.agent.adapters.local_adapter import WORKER_COMMAND, LocalAdapter
from isthmus.agent.adapters.ray.ray_adapter import RayAdapter
from isthmus.agent.adapters.ray.ray_rest import RayRest
from isthmus.agent.adapters.ray.ray_site import RaySite
from isthmus.agent.adapters.ray.render_ray import render_ray
from isthmus.agent.adapters.render_local import render_local
from isthmus.agent.adapters.rendered_hold import PartRequest, RenderedHold
from isthmus.agent.adapters.scheduler_adapter import SchedulerAdapter, SchedulerCheck
from isthmus.agent.adapters.slurm.render_slurm import render_slurm
from isthmus.agent.adapters.slurm.slurm_adapter import SlurmAdapter
from isthmus.agent.adapters.slurm.slurm_commands import SlurmCommands
from isthmus.agent.adapters.slurm.slurm_site import SlurmSite
from isthmus.agent.courier.courier import Courier
from isthmus.core.errors import FieldError, InputError
from isthmus.core.files.validation_errors import suggest_name
from isthmus.core.owner.site_file import SiteFile
from isthmus.core.pool import Cluster

ENTRY_POINT_GROUP = "isthmus.adapters"


@dataclass(frozen=True, kw_only=True)
class SiteContext:
    """What an adapter is made from; `state` is the agent's folder, `host` the address of the agent's machine.

    Nodes of the scheduler must see `state` as well, or their files travel by the courier.
    """

    site: SiteFile
    cluster: Cluster
    state: Path
    worker_command: tuple[str, ...] = WORKER_COMMAND
    host: str = "127.0.0.1"

    def open_courier(self, *, host: str = "", port: int = 0) -> Courier:
        """Return the agent's end of the courier, which workers reach at `host` (empty: the agent's own)."""
        return Courier(self.state, host or self.host, port=port)


AdapterFactory = Callable[[SiteContext], SchedulerAdapter]


def make_adapter(context: SiteContext) -> SchedulerAdapter:
    """Return a new adapter of the site's kind; raise `InputError` for an unknown kind or unusable options."""
    kind = context.site.kind
    if kind in _BUILT_IN:
        return _BUILT_IN[kind](context)
    found = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if kind in found:
        factory: AdapterFactory = found[kind].load()
        return factory(context)
    kinds = sorted({*_BUILT_IN, *found})
    raise FieldError(f"unknown kind of site '{kind}'", place=("kind",), hint=suggest_name(kind, kinds))


def check_scheduler(site: SiteFile, cluster: Cluster) -> Sequence[SchedulerCheck]:
    """Return what the adapter of `site` finds out about its scheduler; nothing stays changed there."""
    with tempfile.TemporaryDirectory() as state:
        adapter = make_adapter(SiteContext(site=site, cluster=cluster, state=Path(state)))
        return adapter.check()


def render_hold(site: SiteFile, cluster: Cluster, part: PartRequest) -> RenderedHold:
    """Return what the adapter of `site` would run or send for a part; nothing is asked.

    Raises `InputError` for a part that `site` cannot hold.
    """
    return _renderer(site)(site, cluster, part)


def containers_of(site: SiteFile) -> str:
    """Return `Capabilities.containers` of a built-in kind; raise `InputError` for others, which render nothing."""
    _renderer(site)
    if site.kind == "ray" and site.options.get("images"):
        return "node"
    return _CONTAINERS.get(site.kind, "none")


def storage_path_of(site: SiteFile) -> str:
    """Return `Capabilities.storage_path` of a site."""
    return str(site.options.get("storage_path", "")) if site.kind == "kubernetes" else ""


def _renderer(site: SiteFile) -> Callable[[SiteFile, Cluster, PartRequest], RenderedHold]:
    if site.kind not in _RENDERERS:
        message = f"a site of kind '{site.kind}' has no job file of its own"
        raise FieldError(message, place=("kind",), hint=f"kinds with a job file: {', '.join(_RENDERERS)}")
    return _RENDERERS[site.kind]


def _make_local(context: SiteContext) -> SchedulerAdapter:
    if context.site.options:
        name = next(iter(context.site.options))
        raise FieldError(f"a site of kind 'local' has no options; given: '{name}'", place=("options", name))
    for group, selector in context.site.node_groups.items():
        given = [field for field in ("partition", "labels", "resource") if getattr(selector, field)]
        if given:
            place, hint = ("node_groups", group, given[0]), "leave it out: its cards are those of pool.yaml"
            raise FieldError(f"a site of kind 'local' has no {given[0]}", place=place, hint=hint)
    return LocalAdapter(context.cluster, context.state / "queue", context.worker_command)


def _make_slurm(context: SiteContext) -> SchedulerAdapter:
    site = SlurmSite(context.site, context.cluster)
    commands = SlurmCommands(config=str(context.site.options.get("config", "")), timeout_s=site.timeout_s)
    return SlurmAdapter(site, context.state, commands, context.worker_command)


def _make_ray(context: SiteContext) -> SchedulerAdapter:
    site, options = RaySite(context.site, context.cluster), context.site.options
    token, token_file = "", str(options.get("token_file", ""))
    if token_file:
        try:
            token = Path(token_file).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise InputError(f"options.token_file {token_file} cannot be read: {error.strerror}") from error
    rest = RayRest(site.address, timeout_s=site.timeout_s, token=token)
    courier = context.open_courier(host=str(options.get("courier_host", "")), port=site.courier_port)
    return RayAdapter(site, context.state, rest, courier, context.worker_command)


def _make_kubernetes(context: SiteContext) -> SchedulerAdapter:
    site, options = KubernetesSite(context.site, context.cluster), context.site.options
    access = read_access(str(options.get("kubeconfig", "")), str(options.get("context", "")))
    client = KubernetesClient(access, timeout_s=site.timeout_s)
    courier = context.open_courier(host=site.courier_host, port=site.courier_port)
    return KubernetesAdapter(site, context.state, client, courier, context.worker_command)


_BUILT_IN: dict[str, AdapterFactory] = {
    "local": _make_local,
    "slurm": _make_slurm,
    "kubernetes": _make_kubernetes,
    "ray": _make_ray,
}

_CONTAINERS = {"local": "agent", "slurm": "agent", "kubernetes": "scheduler"}

_RENDERERS: dict[str, Callable[[SiteFile, Cluster, PartRequest], RenderedHold]] = {
    "local": lambda _, cluster, part: render_local(cluster, part),
    "ray": lambda site, cluster, part: render_ray(RaySite(site, cluster), part),
    "slurm": lambda site, cluster, part: render_slurm(SlurmSite(site, cluster), part),
    "kubernetes": lambda site, cluster, part: render_kubernetes(KubernetesSite(site, cluster), part),
}
