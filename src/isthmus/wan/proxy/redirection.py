"""`redirection`: has the kernel hand connections to other sites to the proxy, for as long as the proxy runs."""

from __future__ import annotations

import errno
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from isthmus.core.errors import UnavailableError
from isthmus.wan.proxy.redirect_rules import RedirectRules

_COMMAND_LIMIT_S = 20.0
_IPV6_TRANSPARENT = 75
"""Socket option of Linux (linux/in6.h), which Python does not name."""

_HINT = "run the proxy as root, or without --redirect: workers then dial its routes (isthmus agent --routes FILE)"


def transparent_listener() -> socket.socket:
    """Return a listening socket of any port that takes connections to addresses of other hosts.

    Raises `UnavailableError` without the right (CAP_NET_ADMIN), and where the kernel has no TPROXY.
    """
    sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.setsockopt(socket.SOL_IP, socket.IP_TRANSPARENT, 1)
        sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_TRANSPARENT, 1)
        sock.bind(("::", 0))
        sock.listen(128)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise UnavailableError(f"connections cannot be redirected: {error.strerror}", hint=_HINT) from error
    return sock


@contextmanager
def redirection(rules: RedirectRules) -> Iterator[None]:
    """Redirect inside the block; what an earlier proxy of the site left behind is replaced.

    Raises `UnavailableError` without nft, ip, the right, or TPROXY in the kernel; nothing stays then.
    """
    for program, package in (("nft", "nftables"), ("ip", "iproute2")):
        if shutil.which(program) is None:
            raise UnavailableError(
                f"the command `{program}` is missing", hint=f"sudo apt-get install -y {package}; or {_HINT}"
            )
    for arguments in rules.undo():
        _run(["ip", *arguments], must=False)
    try:
        _run(["nft", "-f", "-"], text=rules.script())
        for arguments in rules.routes():
            _run(["ip", *arguments])
        yield
    finally:
        _run(["nft", "delete", "table", "inet", rules.table], must=False)
        for arguments in rules.undo():
            _run(["ip", *arguments], must=False)


def _run(command: list[str], *, text: str = "", must: bool = True) -> None:
    try:
        done = subprocess.run(  # noqa: S603 - fixed programs; arguments are numbers and parsed networks
            command, input=text, text=True, capture_output=True, timeout=_COMMAND_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        if must:
            raise UnavailableError(f"`{command[0]}` did not run: {error}", hint=_HINT) from error
        return
    if must and done.returncode:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        raise UnavailableError(f"`{command[0]}` refused to redirect: {lines[0]}", hint=_HINT)


def original_target(connection: socket.socket) -> tuple[str, int]:
    """Return the address that the worker dialled; raises `OSError` for a connection that is gone."""
    host, port = connection.getsockname()[:2]
    if not host:
        raise OSError(errno.ENOTCONN, "the connection is gone")
    return host.removeprefix("::ffff:"), port
