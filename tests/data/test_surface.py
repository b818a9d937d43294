"""What other packages may use of `isthmus.data`."""

import isthmus.data


def test_the_public_surface_is_short_and_deliberate() -> None:
    """A name is added or removed here on purpose, never by accident."""
    assert isthmus.data.__all__ == ["Batch", "Dataset", "open_dataset"]
    assert all(hasattr(isthmus.data, name) for name in isthmus.data.__all__)
