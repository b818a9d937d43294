"""`free_ports`: ports for servers that take theirs by number, minutes after they were chosen."""

from __future__ import annotations

import contextlib
import os
import random
import socket

_FIRST, _LAST = 10_000, 32_000
"""Below the ports that the kernel gives to connections (`net.ipv4.ip_local_port_range`): none of those takes one."""

_choice = random.Random(os.getpid())


def free_ports(count: int) -> list[int]:
    """Return `count` consecutive ports of the loopback interface that nothing listens on."""
    for _ in range(1000):
        first = _choice.randrange(_FIRST, _LAST - count)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return list(range(first, first + count))
    raise OSError(f"no {count} consecutive ports are free from {_FIRST} to {_LAST}")
