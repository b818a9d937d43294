"""`scheduler_topology`: the tree of a node group in the words of a site's own scheduler.

Sources: Slurm's `topology.conf` (plugins `topology/tree` and `topology/block`); the labels and the object `Topology` of
Kueue's topology-aware scheduling.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from isthmus.core.errors import InputError
from isthmus.core.pool_parts.group_topology import GroupTopology

SchedulerKind = Literal["slurm-tree", "slurm-block", "kubernetes"]
LABEL = "isthmus.dev"
"""Prefix of the labels of nodes."""

_Domains = Mapping[str, Sequence[str]]


def scheduler_topology(group: str, nodes: Sequence[str], topology: GroupTopology, kind: SchedulerKind) -> str:
    """Return the text for a scheduler: `topology.conf`, or the commands and the object for Kubernetes.

    `nodes` are all nodes of the group, by the names that the scheduler gives them. Raises `InputError` if the scheduler
    cannot express the topology.
    """
    levels = {name.lower(): domains for name, domains in topology.levels().items()}
    if not levels:
        raise InputError(
            f"node group '{group}': its topology names no super-node, ToR or spine", hint="add them to pool.yaml"
        )
    if kind == "slurm-block":
        lines = list(_blocks(group, levels.get("super-node", {})))
    elif kind == "slurm-tree":
        lines = list(_switches(group, nodes, levels))
    else:
        lines = list(_labels(group, nodes, levels))
    return "\n".join(lines) + "\n"


def _blocks(group: str, super_nodes: _Domains) -> Iterator[str]:
    if not super_nodes:
        raise InputError(
            f"node group '{group}' has no super-nodes, which the blocks of Slurm are",
            hint="use slurm-tree for ToRs and spines",
        )
    for name, nodes in super_nodes.items():
        yield f"BlockName={name} Nodes={','.join(nodes)}"
    yield f"BlockSizes={min(len(nodes) for nodes in super_nodes.values())}"


def _switches(group: str, nodes: Sequence[str], levels: Mapping[str, _Domains]) -> Iterator[str]:
    """Yield a switch for each domain, and one over all: Slurm allocates no job across switches that nothing joins."""
    above = dict.fromkeys(nodes, "")  # the switch of each node so far, "" before it has one
    for level, domains in levels.items():
        for name, members in domains.items():
            own = f"{level}-{name}"
            below = list(dict.fromkeys(above[node] for node in members if above.get(node)))
            alone = [node for node in members if node in above and not above[node]]
            if below and alone:
                yield f"SwitchName={own}-nodes Nodes={','.join(alone)}"
                below.append(f"{own}-nodes")
            if below or alone:
                yield f"SwitchName={own} " + (f"Switches={','.join(below)}" if below else f"Nodes={','.join(alone)}")
            above |= dict.fromkeys((node for node in members if node in above), own)
    tops = list(dict.fromkeys(switch for switch in above.values() if switch))
    alone = [node for node, switch in above.items() if not switch]
    if alone:
        yield f"SwitchName={group}-nodes Nodes={','.join(alone)}"
        tops.append(f"{group}-nodes")
    if len(tops) > 1:
        yield f"SwitchName={group} Switches={','.join(tops)}"


def _labels(group: str, nodes: Sequence[str], levels: Mapping[str, _Domains]) -> Iterator[str]:
    """Yield commands that label the nodes, widest level first, and the object that names the labels."""
    widest_first = list(reversed(levels.items()))
    labels: dict[str, list[str]] = {node: [] for node in nodes}
    for level, domains in widest_first:
        for name, members in domains.items():
            for node in members:
                if node in labels:
                    labels[node].append(f"{LABEL}/{level}={name}")
    for node, found in labels.items():
        if found:
            yield f"kubectl label --overwrite node {node} {' '.join(found)}"
    yield "kubectl apply -f - <<'END'"
    yield from ("apiVersion: kueue.x-k8s.io/v1beta1", "kind: Topology", f"metadata: {{name: isthmus-{group.lower()}}}")
    yield from ("spec:", "  levels:")
    yield from (f"    - {{nodeLabel: {LABEL}/{level}}}" for level, _ in widest_first)
    yield from ("    - {nodeLabel: kubernetes.io/hostname}", "END")
