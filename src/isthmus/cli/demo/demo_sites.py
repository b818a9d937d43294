"""`DemoSites`: where the demo's agents run, if not all at this machine's loopback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DemoSites:
    """Sites in network namespaces: each agent starts by a command of its own, and reaches the server by TLS."""

    server_host: str
    """Address of this machine that all sites reach."""
    prefixes: Mapping[str, tuple[str, ...]]
    """What starts a program at each site."""
    hosts: Mapping[str, str]
    """Address of each site that others reach apart from the emulated links."""
