"""`make_gateway`: the native state machine where it is built, else the one in Python."""

from __future__ import annotations

import importlib

from isthmus.wan.roce.gateway.gateway import Gateway
from isthmus.wan.roce.gateway.gateway_settings import GatewaySettings


def native_gateway() -> type[Gateway] | None:
    """Return the native form, which has what is public of `Gateway`; None where it was not built (`make native`)."""
    try:
        module = importlib.import_module("isthmus.wan.roce.gateway._native")
    except ImportError:
        return None
    found: type[Gateway] = module.NativeGateway
    return found


def make_gateway(settings: GatewaySettings, epoch: int) -> Gateway:
    """Return a gateway as `Gateway(settings, epoch)` is; both forms answer every event with the same instructions."""
    return (native_gateway() or Gateway)(settings, epoch)
