"""`until`: waits for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(happened: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """Return what `happened` returns, once it is true; raise `AssertionError` after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := happened()):
        assert time.monotonic() < deadline_s, f"it did not happen within {timeout_s:g} s"
        time.sleep(0.01)
    return found
