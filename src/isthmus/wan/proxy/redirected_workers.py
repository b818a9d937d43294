"""`RedirectedWorkers`: accepts the connections to other sites that the kernel hands to a proxy."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack, suppress

from isthmus.wan.dial import format_address
from isthmus.wan.proxy.proxy_config import ProxyConfig
from isthmus.wan.proxy.redirect_rules import RedirectRules
from isthmus.wan.proxy.redirection import original_target, redirection, transparent_listener

ServeRedirected = Callable[[str, socket.socket, str], None]
"""Called with the other site, the worker's connection, and the address that the worker dialled."""


class RedirectedWorkers:
    """Redirects from now on until `close`; raises `UnavailableError` where that is not possible."""

    def __init__(self, config: ProxyConfig, loop: asyncio.AbstractEventLoop, serve: ServeRedirected) -> None:
        self._loop, self._serve = loop, serve
        self._listener = transparent_listener()
        exempt = [address for addresses in config.peers.values() for address in addresses]
        port = self._listener.getsockname()[1]
        self._rules = RedirectRules(config.site, config.redirect, port, exempt, config.clients)
        self._kernel = ExitStack()
        try:
            self._kernel.enter_context(redirection(self._rules))
        except BaseException:
            self._listener.close()
            raise
        loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Take the rules back, and accept no more."""
        self._kernel.close()
        self._loop.remove_reader(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        sock.setblocking(False)
        try:
            host, port = original_target(sock)
            site = self._rules.site_of(host)
        except OSError:
            site = None
        if site is None:  # a stranger dialled the listener itself
            sock.close()
        else:
            self._serve(site, sock, format_address(host, port))


def reset(sock: socket.socket) -> None:
    """End a connection so that its other end learns that nothing was delivered."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
