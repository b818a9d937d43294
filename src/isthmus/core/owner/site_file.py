"""`SiteFile`: the scheduler of a site and how it knows the node groups of `pool.yaml`, written as `site.yaml`.

The file stays at the site, beside the owner's policy.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from isthmus.core.base_model import FrozenModel, Name
from isthmus.core.pool import Cluster, UnknownNameError

OptionValue = str | int | float | bool


class NodeSelector(FrozenModel):
    """How a scheduler knows the nodes of a node group, and their cards.

    `partition` is a partition, queue or namespace, `labels` what a node must be labelled with, `resource` the name of a
    card. What is not given is the default of the site's kind.
    """

    partition: str = ""
    labels: dict[str, str] = Field(default_factory=dict)
    resource: str = ""


class SiteFile(FrozenModel):
    """A site's scheduler: its `kind` and how it knows the node groups of the cluster.

    Kinds are `local`, `slurm`, `kubernetes`, `ray` and those of installed packages (entry points
    `isthmus.adapters`). `options` are the kind's own.
    """

    version: Literal[1] = 1
    kind: Name = "local"
    node_groups: dict[Name, NodeSelector] = Field(default_factory=dict)
    options: dict[str, OptionValue] = Field(default_factory=dict)

    def check_cluster(self, cluster: Cluster) -> None:
        """Raise `UnknownNameError` if the file names a node group that `cluster` lacks."""
        groups = [group.name for group in cluster.node_groups]
        for group in self.node_groups:
            if group not in groups:
                raise UnknownNameError("node group", group, groups)
