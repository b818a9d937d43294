"""`LinkKeys`: the keys with which one rank opens connections to the ranks of its own and of other sites."""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from isthmus.core.errors import InputError

KEY_ID_BYTES = 16

_MAX_REMEMBERED = 2**16
"""Greetings that a rank remembers: 6 MiB. One that is older is refused for its missing proof."""


@dataclass(frozen=True)
class LinkKeys:
    """The keys of an attempt that site `site` holds: one for each pair of it with a site, itself included.

    `sites[r]` is the site of rank `r`. A site has no key of a pair of others, so it cannot speak for their ranks.
    """

    site: str
    sites: tuple[str, ...]
    keys: Mapping[str, bytes] = field(repr=False)
    """The key shared with each site, 32 bytes."""
    _used: set[bytes] = field(default_factory=set, repr=False, compare=False)

    def __post_init__(self) -> None:
        missing = sorted(set(self.sites) - self.keys.keys())
        if missing:
            raise InputError(
                f"no key for the links between {self.site} and {', '.join(missing)}",
                hint="the key file names every site of the plan, its own included",
            )

    @cached_property
    def _sites_by_id(self) -> Mapping[bytes, str]:
        return {self._derive(site, "key id")[:KEY_ID_BYTES]: site for site in set(self.sites)}

    def site_of_key(self, key_id: bytes) -> str | None:
        """Return the site that shares the key with id `key_id`, None for an unknown one."""
        return self._sites_by_id.get(key_id)

    def key_id(self, site: str) -> bytes:
        """Return the id of the key shared with `site`: what a dialler sends first; it does not reveal the key."""
        return self._derive(site, "key id")[:KEY_ID_BYTES]

    def psk(self, site: str) -> bytes:
        """Return the pre-shared key of handshakes with ranks of `site`."""
        return self._derive(site, "handshake")

    def is_first_use(self, ephemeral: bytes) -> bool:
        """Return whether no greeting with this ephemeral key was seen before; members alone make new ones."""
        if len(self._used) >= _MAX_REMEMBERED:
            self._used.clear()
        known = ephemeral in self._used
        self._used.add(ephemeral)
        return not known

    def as_dict(self) -> dict[str, object]:
        """Return the keys as JSON values, for the socket pair to a transport process."""
        return {"site": self.site, "sites": self.sites, "keys": {site: key.hex() for site, key in self.keys.items()}}

    @classmethod
    def from_hex(cls, site: str, sites: Sequence[str], keys: Mapping[str, str]) -> LinkKeys:
        """Return the keys that hexadecimal `keys` name."""
        return cls(site, tuple(sites), {name: bytes.fromhex(key) for name, key in keys.items()})

    def _derive(self, site: str, use: str) -> bytes:
        return hmac.digest(self.keys[site], f"isthmus link: {use}".encode(), "sha256")
