"""`make_gateway`: the native state machine where it is built, else the one in Python."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from isthmus.wan.roce.gateway.gateway import Gateway
from isthmus.wan.roce.gateway.gateway_settings import GatewaySettings

if TYPE_CHECKING:
    from isthmus.wan.roce.gateway._native import NativeGateway

    AnyGateway = Gateway | NativeGateway


def native_gateway() -> type[NativeGateway] | None:
    """Return the native form of `Gateway`, None where it was not built (`make native`)."""
    try:
        module = importlib.import_module("isthmus.wan.roce.gateway._native")
    except ImportError:
        return None
    found: type[NativeGateway] = module.NativeGateway
    return found


def make_gateway(settings: GatewaySettings, epoch: int) -> AnyGateway:
    """Return a gateway as `Gateway(settings, epoch)` is; both forms answer every event with the same instructions."""
    return (native_gateway() or Gateway)(settings, epoch)
