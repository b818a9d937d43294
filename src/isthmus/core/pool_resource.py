"""`PoolResource`: a resource of the pool that jobs hold an amount of, as a key of such amounts."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from isthmus.core.errors import InputError

ResourceKind = Literal["chips", "link", "storage"]

KBPS_PER_GBPS = 1e6
"""kbit/s in a Gbit/s."""

_CACHE_SIZE = 1 << 16
"""Resources kept, so that the needs of a million jobs share them and compare by identity."""


class PoolResource(NamedTuple):
    """Chips of a node group, storage of a cluster, or one direction of the link between two clusters.

    Amounts are chips, bytes, and kbit/s. `chips`, `storage` and `link` return the shared instance of a resource.
    The text form, in bodies and messages, is `CLUSTER/GROUP`, `CLUSTER:storage`, `FROM>TO`.
    """

    kind: ResourceKind
    # Cluster of the chips or the storage; source of the link.
    cluster: str
    # Node group of the chips; target cluster of the link; "" for storage.
    name: str = ""

    @classmethod
    @lru_cache(_CACHE_SIZE)
    def chips(cls, cluster: str, group: str) -> PoolResource:
        """Return the chips of a node group."""
        return cls("chips", cluster, group)

    @classmethod
    @lru_cache(_CACHE_SIZE)
    def storage(cls, cluster: str) -> PoolResource:
        """Return the storage of a cluster."""
        return cls("storage", cluster)

    @classmethod
    @lru_cache(_CACHE_SIZE)
    def link(cls, source: str, target: str) -> PoolResource:
        """Return the link from `source` to `target`."""
        return cls("link", source, target)

    @classmethod
    def parse(cls, text: str) -> PoolResource:
        """Return the resource of a text form; raises `InputError` for other text."""
        for separator, make in (("/", cls.chips), (">", cls.link)):
            cluster, found, name = text.partition(separator)
            if cluster and found and name:
                return make(cluster, name)
        cluster, _, name = text.partition(":")
        if cluster and name == "storage":
            return cls.storage(cluster)
        raise InputError(f"'{text}' names no resource", hint="write CLUSTER/GROUP, CLUSTER:storage or FROM>TO")

    def __str__(self) -> str:
        """Return the text form."""
        if self.kind == "chips":
            return f"{self.cluster}/{self.name}"
        return f"{self.cluster}>{self.name}" if self.kind == "link" else f"{self.cluster}:storage"
