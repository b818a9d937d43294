"""`slurm_topology`: the topology of nodes from `scontrol show topology` or a `topology.conf`.

Slurm's `topology/tree` names switches: those with nodes of their own are ToRs, those right above them spines; what is
above joins all. `topology/block` names blocks, which are super-nodes. A switch that `isthmus site topology` has named
is of the level in its name.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from isthmus.agent.adapters.slurm.slurm_output import expand_nodes
from isthmus.core.errors import InputError
from isthmus.core.pool_parts.found_topology import found_topology
from isthmus.core.pool_parts.group_topology import MAX_DOMAINS, MAX_NAMED_NODES, GroupTopology

MAX_TEXT_CHARS = 16_000_000
"""Longest text that is read."""
_FIELD = re.compile(r"(SwitchName|BlockName|Nodes|Switches)=(\S*)", re.IGNORECASE)
_OWN_NAME = re.compile(r"(super-node|tor|spine)-(.+)")


def slurm_topology(text: str, nodes: Collection[str]) -> GroupTopology | None:
    """Return the topology of `nodes`; None if the text names none of them. Raises `InputError` for unusable text."""
    if len(text) > MAX_TEXT_CHARS:
        raise InputError(f"Slurm's topology has more than {MAX_TEXT_CHARS:,} characters", hint="state it in pool.yaml")
    switches: dict[str, tuple[str, str]] = {}
    blocks: dict[str, list[str]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        fields = {key.lower(): value for key, value in _FIELD.findall(line.partition("#")[0])}
        if len(switches) + len(blocks) >= MAX_DOMAINS:
            raise InputError(f"Slurm's topology has more than {MAX_DOMAINS:,} switches", hint="state it in pool.yaml")
        if name := fields.get("blockname"):
            blocks[name] = _expanded(fields.get("nodes", ""), number)
        elif name := fields.get("switchname"):
            switches[name] = (fields.get("nodes", ""), fields.get("switches", ""))
    levels: dict[str, dict[str, list[str]]] = {"super-node": blocks, "tor": {}, "spine": {}}
    written = any(_OWN_NAME.fullmatch(name) for name in switches)
    tree = _Tree(switches)
    for name in switches:
        own = _OWN_NAME.fullmatch(name)
        if written and own is not None and not name.endswith("-nodes"):
            levels[own[1]][own[2]] = tree.nodes(name)
        elif not written and (height := tree.height(name)) < 2:
            levels["spine" if height else "tor"][name] = tree.nodes(name)
    return found_topology(nodes, super_nodes=levels["super-node"], tors=levels["tor"], spines=levels["spine"])


class _Tree:
    """Switches by name, with the lists of their nodes and of the switches below them."""

    def __init__(self, switches: dict[str, tuple[str, str]]) -> None:
        self._below = {
            name: [one for one in _expanded(below, at) if one in switches]
            for at, (name, (_, below)) in enumerate(switches.items(), 1)
        }
        self._own = {
            name: [] if self._below[name] else _expanded(own, at)
            for at, (name, (own, _)) in enumerate(switches.items(), 1)
        }

    def height(self, name: str) -> int:
        """Return how many switches are below a switch, one below the other: 0, 1, or 2 for more."""
        return 0 if not self._below[name] else 1 + max(min(1, len(self._below[one])) for one in self._below[name])

    def nodes(self, name: str) -> list[str]:
        """Return the nodes below a switch; raise `InputError` for switches that are below themselves."""
        found, open_names, seen = list[str](), [name], {name}
        while open_names:
            at = open_names.pop(0)
            found += self._own[at]
            for one in self._below[at]:
                if one in seen:
                    raise InputError(f"switch '{one}' of Slurm's topology is below two others, or below itself")
                seen.add(one)
                open_names.append(one)
        return found


def _expanded(text: str, number: int) -> list[str]:
    """Return the names of a list; raise `InputError` for other text and for too many."""
    found = list[str]()
    try:
        for name in expand_nodes(text):
            found.append(name)
            if len(found) > MAX_NAMED_NODES:
                raise InputError(f"line {number} of Slurm's topology names more than {MAX_NAMED_NODES:,} nodes")
    except ValueError as error:
        raise InputError(f"line {number} of Slurm's topology cannot be read: {str(error)[:200]}") from error
    return found
