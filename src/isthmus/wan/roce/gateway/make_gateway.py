"""`make_gateway`: the native state machine where it is built, else the one in Python."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

from isthmus.core.errors import UnavailableError
from isthmus.wan.roce.gateway.gateway import Gateway
from isthmus.wan.roce.gateway.gateway_settings import GatewaySettings
from isthmus.wan.roce.gateway.native_digest import native_digest

SOURCES = Path(__file__).parent / "native"
_HINT = "run `make native`, or delete the `_native` module beside the gateway's sources to use Python's"


@functools.cache
def native_gateway() -> type[Gateway] | None:
    """Return the native form, which has what is public of `Gateway`; None where it was not built (`make native`).

    Raises `UnavailableError` if it cannot be loaded, or was made of other sources than those beside it.
    """
    try:
        module = importlib.import_module("isthmus.wan.roce.gateway._native")
    except ModuleNotFoundError:
        return None
    except ImportError as error:
        raise UnavailableError(f"the native gateway cannot be loaded: {error}", hint=_HINT) from error
    if SOURCES.is_dir() and getattr(module, "SOURCES", "") != native_digest(SOURCES):
        raise UnavailableError(f"the native gateway was made of other sources than {SOURCES} has now", hint=_HINT)
    found: type[Gateway] = module.NativeGateway
    return found


def make_gateway(settings: GatewaySettings, epoch: int) -> Gateway:
    """Return a gateway as `Gateway(settings, epoch)` is; both forms answer every event with the same instructions."""
    return (native_gateway() or Gateway)(settings, epoch)
