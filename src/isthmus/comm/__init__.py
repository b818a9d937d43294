"""Communication between workers: the `isthmus` process group of torch.distributed and its transport."""

from isthmus.comm.group import BACKEND, IsthmusGroup, IsthmusOptions, register_backend
from isthmus.comm.memory import memory_transports
from isthmus.comm.tcp import TcpTransport
from isthmus.comm.transport import Arrival, Traffic, Transport

__all__ = [
    "BACKEND",
    "Arrival",
    "IsthmusGroup",
    "IsthmusOptions",
    "TcpTransport",
    "Traffic",
    "Transport",
    "memory_transports",
    "register_backend",
]
