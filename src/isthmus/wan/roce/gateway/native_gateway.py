"""`native_gateway`: the state machine in C++, where it is built."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from isthmus.core.errors import UnavailableError
from isthmus.wan.roce.gateway.gateway import Gateway
from isthmus.wan.roce.gateway.native_digest import native_digest

SOURCES = Path(__file__).parent / "native"
_HINT = "run `make native`, or delete the `_native` module beside the gateway's sources to use Python's"


def _load() -> ModuleType:
    return importlib.import_module("isthmus.wan.roce.gateway._native")


@functools.cache
def native_gateway(load: Callable[[], ModuleType] = _load, sources: Path = SOURCES) -> type[Gateway] | None:
    """Return the native form, which has what is public of `Gateway`; None where it was not built (`make native`).

    Raises `UnavailableError` if it cannot be loaded, or was made of other sources than those beside it.
    """
    try:
        module = load()
    except ModuleNotFoundError:
        return None
    except ImportError as error:
        raise UnavailableError(f"the native gateway cannot be loaded: {error}", hint=_HINT) from error
    if sources.is_dir() and getattr(module, "SOURCES", "") != native_digest(sources):
        raise UnavailableError(f"the native gateway was made of other sources than {sources} has now", hint=_HINT)
    found: type[Gateway] = module.NativeGateway
    return found
