"""Detect loopback addresses, whose traffic never leaves the machine."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether `host`, a name or an address with or without brackets, is a loopback address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
