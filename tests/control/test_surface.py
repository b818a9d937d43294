"""What other packages may use of `isthmus.control`."""

from __future__ import annotations

import subprocess
import sys

import isthmus.control.server


def test_the_public_surface_is_two_modules() -> None:
    """`server` runs the control plane; `coordinator`, pure, may be driven by others."""
    assert isthmus.control.server.run_server.__all__ == [
        "Listening",
        "ServerConfig",
        "create_app",
        "run_server",
    ]
    assert isthmus.control.coordinator.coordinator.__all__ == ["Coordinator", "Rules"]


def test_the_coordinator_needs_no_server() -> None:
    """Whoever simulates a pool loads neither the network nor the store."""
    code = "import sys, isthmus.control.coordinator.coordinator; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert not {"fastapi", "uvicorn", "sqlite3", "cryptography"} & set(loaded.stdout.split())
