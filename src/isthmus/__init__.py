"""Train one large model across clusters with different owners, chips and locations.

`Client` submits and follows jobs; it is loaded at first use. `isthmus.plan` and `isthmus.sim` plan and simulate.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isthmus.client.client import Client, JobUpdate
    from isthmus.client.log_lines import LogLine
    from isthmus.core.errors import IsthmusError

__version__ = "0.1.0"

__all__ = ["Client", "IsthmusError", "JobUpdate", "LogLine"]

_HOMES = {
    "Client": "isthmus.client.client",
    "IsthmusError": "isthmus.core.errors",
    "JobUpdate": "isthmus.client.client",
    "LogLine": "isthmus.client.log_lines",
}


def __getattr__(name: str) -> Any:
    """Load a public name at its first use, so that `import isthmus` stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module 'isthmus' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
