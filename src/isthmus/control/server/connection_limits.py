"""`ConnectionLimits`: which connections the server holds. Pure: addresses and times are arguments.

A connection is unproven until a request on it had a valid token. Strangers can open any number of connections, so a
newcomer takes the place of the oldest unproven one: of its own address, then of all. A client with a token proves its
connection within milliseconds; silent ones are the oldest (the policy of half-open connections in RFC 4987, 3.4).
"""

from __future__ import annotations

import functools
import ipaddress
import itertools
from collections import Counter, OrderedDict
from dataclasses import dataclass

HEAD_LIMIT_S = 10.0
"""Longest time from the start of a connection, or from a request's first byte, to the end of its head."""
BODY_GRACE_S = 20.0
"""Time for a body's first bytes."""
BODY_LEAST_BYTES_PER_S = 16 * 1024
"""Least throughput of a body after that, as `MinRate` of Apache's mod_reqtimeout."""
WRITE_LIMIT_S = 30.0
"""Longest time in which a reader accepts nothing of an answer."""
MAX_CONNECTIONS = 16_384
"""Largest number of connections, where the limit of open files allows it."""
RESERVED_FILES = 256
"""Open files kept for everything else: store, snapshots, planner, log."""
IPV6_NETWORK_BITS = 64
"""IPv6 addresses of one network count as one: a host has all of them (RFC 6177)."""


@dataclass(frozen=True, kw_only=True)
class ConnectionCaps:
    """Largest numbers of connections: in all, unproven, unproven of an address, of a caller; and the time limits."""

    in_all: int
    unproven: int
    per_address: int
    per_caller: int
    head_limit_s: float = HEAD_LIMIT_S
    body_grace_s: float = BODY_GRACE_S
    write_limit_s: float = WRITE_LIMIT_S


def caps_within(max_files: int, most: int = MAX_CONNECTIONS) -> ConnectionCaps:
    """Return the caps of a process that may open `max_files` files."""
    in_all = max(16, min(most, max_files - RESERVED_FILES, max_files * 3 // 4))
    unproven = in_all // 2
    return ConnectionCaps(
        in_all=in_all, unproven=unproven, per_address=max(8, unproven // 4), per_caller=max(8, in_all // 8)
    )


@functools.lru_cache(maxsize=4096)
def address_key(address: str) -> str:
    """Return what limits count by: an IPv4 address, or the network of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4:
        return str(parsed)
    mapped = parsed.ipv4_mapped
    return str(mapped) if mapped else str(ipaddress.ip_network((int(parsed), IPV6_NETWORK_BITS), strict=False))


@dataclass(slots=True, eq=False)
class ClientConnection:
    """A connection: its address, the caller that it proved, and when it is closed unless something arrives or leaves.

    Deadlines are seconds on the clock of the caller; None: the server is at work, or idle time has its own limit.
    """

    address: str
    caps: ConnectionCaps
    caller: str | None = None
    read_deadline_s: float | None = None
    write_deadline_s: float | None = None
    body_start_s: float | None = None
    body_bytes: int = 0

    def on_head_awaited(self, now_s: float) -> None:
        """Note that a part of a head has arrived; the deadline of the first part holds."""
        self.body_start_s = None
        if self.read_deadline_s is None:
            self.read_deadline_s = now_s + self.caps.head_limit_s

    def on_body_awaited(self, now_s: float, num_bytes: int) -> None:
        """Note that `num_bytes` have arrived and that the body goes on."""
        if self.body_start_s is None:
            self.body_start_s, self.body_bytes = now_s, 0
        self.body_bytes += num_bytes
        self.read_deadline_s = self.body_start_s + self.caps.body_grace_s + self.body_bytes / BODY_LEAST_BYTES_PER_S

    def on_request_complete(self) -> None:
        """Note that nothing is awaited of the client."""
        self.read_deadline_s = self.body_start_s = None

    def is_overdue(self, now_s: float) -> bool:
        """Return whether a deadline has passed."""
        read_s, write_s = self.read_deadline_s, self.write_deadline_s
        return (read_s is not None and read_s <= now_s) or (write_s is not None and write_s <= now_s)


class ConnectionLimits:
    """The open connections and what to do with a new one."""

    def __init__(self, caps: ConnectionCaps) -> None:
        self.caps = caps
        self._open: set[ClientConnection] = set()
        # Oldest first, in all and by address; dictionaries without values keep the order and delete in O(1).
        self._unproven: OrderedDict[ClientConnection, None] = OrderedDict()
        self._by_address: dict[str, OrderedDict[ClientConnection, None]] = {}
        self._of_caller: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        """Return the number of open connections."""
        return len(self._open)

    def open(self, address: str, now_s: float) -> tuple[ClientConnection | None, ClientConnection | None]:
        """Return the new connection, None if it is refused; and the one to close for it, None without."""
        key = address_key(address)
        victim = None
        own = self._by_address.get(key)
        if own is not None and len(own) >= self.caps.per_address:
            victim = next(iter(own))
        elif len(self._unproven) >= self.caps.unproven or len(self._open) >= self.caps.in_all:
            victim = self.oldest_unproven()
            if victim is None:
                return None, None
        if victim is not None:
            self.close(victim)
        made = ClientConnection(key, self.caps, read_deadline_s=now_s + self.caps.head_limit_s)
        self._open.add(made)
        self._unproven[made] = None
        self._by_address.setdefault(key, OrderedDict())[made] = None
        return made, victim

    def prove(self, connection: ClientConnection, caller: str) -> bool:
        """Note that a request on it had a valid token of `caller`; return False beyond the caller's connections."""
        if connection.caller == caller or connection not in self._open:
            return True
        full = len(self._open) - len(self._unproven) >= self.caps.in_all - self.caps.unproven // 2
        if self._of_caller[caller] >= self.caps.per_caller or (full and connection.caller is None):
            return False
        self._forget(connection)
        connection.caller = caller
        self._of_caller[caller] += 1
        return True

    def close(self, connection: ClientConnection) -> None:
        """Forget a connection; may be called twice."""
        if connection in self._open:
            self._open.remove(connection)
            self._forget(connection)

    def oldest_unproven(self) -> ClientConnection | None:
        """Return the unproven connection that is open for longest, None without one."""
        return next(iter(self._unproven), None)

    def overdue(self, now_s: float, most: int | None = None) -> list[ClientConnection]:
        """Return the connections whose deadline has passed, `most` of them at most."""
        return list(itertools.islice((one for one in self._open if one.is_overdue(now_s)), most))

    def _forget(self, connection: ClientConnection) -> None:
        if connection.caller is not None:
            self._of_caller[connection.caller] -= 1
            if not self._of_caller[connection.caller]:
                del self._of_caller[connection.caller]
            return
        del self._unproven[connection]
        own = self._by_address[connection.address]
        del own[connection]
        if not own:
            del self._by_address[connection.address]
