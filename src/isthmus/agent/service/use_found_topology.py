"""`use_found_topology`: node groups without a topology in `pool.yaml` get the one that their scheduler knows."""

from __future__ import annotations

import logging

from pydantic import ValidationError

from isthmus.agent.adapters.scheduler_adapter import SchedulerAdapter
from isthmus.core.errors import InputError, UnavailableError
from isthmus.core.pool import Cluster, NodeGroup
from isthmus.core.pool_parts.group_topology import GroupTopology

_log = logging.getLogger(__name__)


def use_found_topology(cluster: Cluster, adapter: SchedulerAdapter) -> Cluster:
    """Return `cluster` as `pool.yaml` would state it with what `adapter` finds; what it states wins, `{}` as well."""
    silent = [group for group in cluster.node_groups if group.topology is None]
    try:
        found = adapter.topologies() if silent else {}
        groups = tuple(_with_topology(cluster.name, one, found.get(one.name)) for one in cluster.node_groups)
    except (InputError, UnavailableError) as error:
        _log.warning("%s: parts are placed without a topology: %s", cluster.name, error)
        return cluster
    return cluster if groups == cluster.node_groups else cluster.model_copy(update={"node_groups": groups})


def _with_topology(cluster: str, group: NodeGroup, found: GroupTopology | None) -> NodeGroup:
    """Return a node group with what was found; raise `InputError` if that is of other cards or nodes than it has."""
    if found is None or group.topology is not None:
        return group
    try:
        made = NodeGroup.model_validate(dict(group) | {"topology": found})
    except ValidationError as error:
        raise InputError(
            f"node group '{group.name}': {error.errors()[0]['msg']}", hint="state it in pool.yaml"
        ) from error  # fmt: skip
    counts = ", ".join(f"{len(domains)} {level}s" for level, domains in found.levels().items())
    _log.info("%s: node group '%s' is placed by the topology found: %s", cluster, group.name, counts or "linked cards")
    return made
