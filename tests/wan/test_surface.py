"""What other packages may use of `isthmus.wan`."""

from __future__ import annotations

import isthmus.wan


def test_the_public_surface_is_short_and_deliberate() -> None:
    """A name is added or removed here on purpose, never by accident."""
    assert isthmus.wan.__all__ == [
        "BackgroundLinks",
        "Namespaces",
        "dial",
        "emulated_namespaces",
        "links_in_background",
        "run_links",
    ]
    assert all(hasattr(isthmus.wan, name) for name in isthmus.wan.__all__)
