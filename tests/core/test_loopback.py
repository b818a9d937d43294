"""Which addresses stay on this machine."""

from __future__ import annotations

import pytest

from isthmus.core.loopback import is_loopback


@pytest.mark.parametrize(
    ("host", "local"),
    [("localhost", True), ("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("10.0.0.1", False),
     ("localhost.example", False), ("0.0.0.0", False), ("[::1]", True)],
)  # fmt: skip
def test_loopback_is_this_machine_only(host: str, local: bool) -> None:
    """Only addresses that no other machine reaches count."""
    assert is_loopback(host) is local
