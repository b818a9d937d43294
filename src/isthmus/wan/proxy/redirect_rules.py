"""`RedirectRules`: what the kernel is told, so that connections to other sites come to the proxy as they are.

Source: the report on cross-domain pooling, 4.2.6, step 2. TPROXY hands a connection to the proxy with its original
addresses, so that a worker dials the other site's worker itself and needs no route. Connections of other hosts that
pass through this one are taken as they arrive; those of this host are marked on their way out, which sends them back
in over loopback.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from isthmus.core.errors import InputError
from isthmus.core.messages.datagram import Address
from isthmus.wan.proxy.proxy_config import LOOPBACK, Network

_MARKS = 0x15740000
"""Marks and routing tables of proxies: this, and 16 bits of the site's name."""


@dataclass(frozen=True)
class RedirectRules:
    """Connections from this host, or through it, to the networks of `sites` go to `port` of the proxy of `site`."""

    site: str
    sites: Mapping[str, Sequence[Network]]
    port: int
    exempt: Sequence[Address]
    """Proxies of the other sites, at their addresses: the proxy's own connections to them stay as they are."""
    clients: Sequence[Network] = ()
    """Networks of other hosts whose connections are taken as they pass through this host; this host's always are."""

    def __post_init__(self) -> None:
        networks = [(one, site) for site, given in self.sites.items() for one in given]
        for number, (one, site) in enumerate(networks):
            for other, owner in networks[:number]:
                if one.version == other.version and one.overlaps(other):
                    raise InputError(
                        f"{other} of {owner} and {one} of {site} overlap", hint="name each address once in --redirect"
                    )
            if any(one.version == own.version and one.overlaps(own) for own in LOOPBACK):
                raise InputError(f"{one} of {site} holds this host itself", hint="name the other site's network")

    @property
    def table(self) -> str:
        """Name of the nftables table; each start replaces it whole."""
        return f"isthmus_proxy_{self.mark & 0xFFFF:04x}"

    @property
    def mark(self) -> int:
        """Mark of redirected packets, and number of the routing table that delivers them here."""
        return _MARKS | zlib.crc32(self.site.encode()) & 0xFFFF

    def site_of(self, address: str) -> str | None:
        """Return the site in whose networks `address` is."""
        host = ip_address(address)
        for site, networks in self.sites.items():
            if any(host.version == one.version and host in one for one in networks):
                return site
        return None

    def script(self) -> str:
        """Return the script for `nft -f -` that makes the table, in place of an earlier one."""
        mark = f"meta mark set {self.mark:#x}"
        lines = [f"table inet {self.table}", f"delete table inet {self.table}", f"table inet {self.table} {{"]
        lines.append("  chain incoming { type filter hook prerouting priority mangle; policy accept;")
        for family, match in self._matches():
            lines += [
                f"    {source} {match} tproxy {family} to :{self.port} {mark} accept"
                for source in self._sources(family)
            ]
        lines += ["  }", "  chain outgoing { type route hook output priority mangle; policy accept;"]
        lines += [f"    {match} {mark}" for _, match in self._matches()]
        return "\n".join([*lines, "  }", "}", ""])

    def routes(self) -> list[list[str]]:
        """Return the arguments of `ip` that deliver marked packets here; each has an inverse in `undo`."""
        return [arguments for family in self._families() for arguments in self._routing(family, "add", "replace")]

    def undo(self) -> list[list[str]]:
        """Return the arguments of `ip` that take `routes` back."""
        return [arguments for family in self._families() for arguments in self._routing(family, "del", "del")]

    def _routing(self, family: str, rule: str, route: str) -> list[list[str]]:
        table = str(self.mark)
        everything = "0.0.0.0/0" if family == "-4" else "::/0"
        return [
            [family, "rule", rule, "fwmark", hex(self.mark), "lookup", table],
            [family, "route", route, "local", everything, "dev", "lo", "table", table],
        ]

    def _families(self) -> list[str]:
        return [f"-{version}" for version in sorted({one.version for given in self.sites.values() for one in given})]

    def _sources(self, family: str) -> list[str]:
        """Return what takes this host's own connections, and those of its clients."""
        version = 4 if family == "ip" else 6
        named = [str(one) for one in self.clients if one.version == version and one not in LOOPBACK]
        return ['iifname "lo"', *([f"{family} saddr {{ {', '.join(named)} }}"] if named else [])]

    def _matches(self) -> list[tuple[str, str]]:
        found = []
        for networks in self.sites.values():
            for one in networks:
                family = "ip" if one.version == 4 else "ip6"
                own = [f"{host} . {port}" for host, port in self.exempt if (":" in host) == (one.version == 6)]
                but = f" {family} daddr . tcp dport != {{ {', '.join(own)} }}" if own else ""
                found.append((family, f"{family} daddr {one} meta l4proto tcp{but}"))
        return found
