"""`found_topology`: the topology of a node group from domains that a scheduler knows, as `pool.yaml` would state it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from pydantic import ValidationError

from isthmus.core.errors import InputError
from isthmus.core.pool_parts.group_topology import GroupTopology

Domains = Mapping[str, Iterable[str]]
"""Nodes by the name of their domain."""


def found_topology(
    nodes: Collection[str], *, super_nodes: Domains, tors: Domains, spines: Domains
) -> GroupTopology | None:
    """Return the topology of `nodes`; None if no domain has one of them. Nodes of others are left out.

    Raises `InputError` for domains that form no tree.
    """
    levels: dict[str, list[dict[str, object]]] = {}
    for field, domains in (("super_nodes", super_nodes), ("tors", tors), ("spines", spines)):
        for name, members in domains.items():
            own = [node for node in dict.fromkeys(members) if node in nodes]
            if own:
                levels.setdefault(field, []).append({"name": name, "nodes": own})
    if not levels:
        return None
    try:
        return GroupTopology.model_validate(levels)
    except ValidationError as error:
        raise InputError(
            f"the scheduler's topology is not used: {error.errors()[0]['msg']}", hint="state it in pool.yaml"
        ) from error
