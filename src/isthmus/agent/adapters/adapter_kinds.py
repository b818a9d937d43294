"""`make_adapter`: the adapter of a site's kind; further kinds are entry points of the group `isthmus.adapters`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from isthmus.agent.adapters.local_adapter import WORKER_COMMAND, LocalAdapter
from isthmus.agent.adapters.scheduler_adapter import SchedulerAdapter, SchedulerCheck
from isthmus.agent.adapters.slurm.slurm_adapter import SlurmAdapter
from isthmus.agent.adapters.slurm.slurm_commands import SlurmCommands
from isthmus.agent.adapters.slurm.slurm_site import SlurmSite
from isthmus.core.errors import InputError
from isthmus.core.files.validation_errors import suggest_name
from isthmus.core.owner.site_file import SiteFile
from isthmus.core.pool import Cluster

ENTRY_POINT_GROUP = "isthmus.adapters"


@dataclass(frozen=True, kw_only=True)
class SiteContext:
    """What an adapter is made from; `state` is the agent's folder, which nodes of the scheduler must see as well."""

    site: SiteFile
    cluster: Cluster
    state: Path
    worker_command: tuple[str, ...] = WORKER_COMMAND


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
    raise InputError(f"unknown kind of site '{kind}'", hint=suggest_name(kind, kinds))


def check_scheduler(site: SiteFile, cluster: Cluster) -> Sequence[SchedulerCheck]:
    """Return what the adapter of `site` finds out about its scheduler; nothing is changed there."""
    with tempfile.TemporaryDirectory() as state:
        adapter = make_adapter(SiteContext(site=site, cluster=cluster, state=Path(state)))
        return adapter.check()


def _make_local(context: SiteContext) -> SchedulerAdapter:
    if context.site.options:
        raise InputError(f"a site of kind 'local' has no options; given: {', '.join(context.site.options)}")
    return LocalAdapter(context.cluster, context.state / "queue", context.worker_command)


def _make_slurm(context: SiteContext) -> SchedulerAdapter:
    options = context.site.options
    commands = SlurmCommands(config=str(options.get("config", "")), timeout_s=float(options.get("timeout_s", 10.0)))
    return SlurmAdapter(SlurmSite(context.site, context.cluster), context.state, commands, context.worker_command)


_BUILT_IN: dict[str, AdapterFactory] = {"local": _make_local, "slurm": _make_slurm}
