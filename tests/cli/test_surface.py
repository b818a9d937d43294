"""What other packages may use of `isthmus.cli`."""

from __future__ import annotations

import isthmus.cli


def test_the_public_surface_is_the_entry_point() -> None:
    """Commands are for people and scripts; Python code uses the packages below."""
    assert isthmus.cli.__all__ == ["main"]
