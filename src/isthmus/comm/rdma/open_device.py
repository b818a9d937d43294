"""`open_device`: the RDMA device of a name, once per process; `check_device` looks whether there is one."""

from __future__ import annotations

import threading

from isthmus.comm.rdma.ibverbs_device import IbverbsDevice, open_card
from isthmus.comm.rdma.user_space_device import UserSpaceDevice
from isthmus.comm.rdma.verbs import VerbsDevice
from isthmus.core.errors import InputError

AUTO, USER_SPACE = "auto", "user-space:"

_devices: dict[str, VerbsDevice] = {}
_lock = threading.Lock()


def open_device(name: str) -> VerbsDevice:
    """Return the device `name`: a card's name, `auto:N` for the Nth usable card (modulo), or `user-space:IPV4`.

    It stays open for the next call. Raises `InputError` if there is none.
    """
    with _lock:
        if name not in _devices:
            _devices[name] = _open(name)
        return _devices[name]


def check_device(name: str) -> None:
    """Raise `InputError` if this machine lacks the device `name`, which is left to another process."""
    with _lock:
        if name not in _devices:
            _open(name).close()


def use_device(name: str, device: VerbsDevice) -> None:
    """Let `open_device` return `device` by `name`, as tests and drivers of other cards do."""
    with _lock:
        _devices[name] = device


def _open(name: str) -> IbverbsDevice | UserSpaceDevice:
    if not name.startswith(USER_SPACE):
        kind, _, number = name.partition(":")
        return open_card("", int(number or 0)) if kind == AUTO else open_card(name)
    address = name.removeprefix(USER_SPACE)
    try:
        return UserSpaceDevice(address)
    except OSError as error:
        raise InputError(
            f"the RDMA device {name} cannot be opened: {error.strerror or error}",
            hint="another process of this machine may have UDP port 4791 of this address",
        ) from error
