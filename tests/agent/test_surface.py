"""What other packages may use of `isthmus.agent`."""

from __future__ import annotations

import isthmus.agent


def test_the_public_surface_is_short_and_deliberate() -> None:
    """A name is added or removed here on purpose, never by accident."""
    assert isthmus.agent.__all__ == [
        "Adapter",
        "AgentConfig",
        "LocalAdapter",
        "LocalJobFile",
        "WorkerStatus",
        "run_agent",
        "submit_local",
    ]
    assert all(hasattr(isthmus.agent, name) for name in isthmus.agent.__all__)
