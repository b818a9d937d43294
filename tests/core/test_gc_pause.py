"""Rules of the pause of the garbage collector."""

from __future__ import annotations

import gc

import pytest

from isthmus.core.process.gc_pause import collection_paused


def test_no_garbage_is_collected_inside_and_it_is_afterwards() -> None:
    """Also after a block that raised; a collector that was off stays off."""
    with collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), collection_paused():
        1 / gc.isenabled()
    with collection_paused(), collection_paused():
        pass
    assert gc.isenabled()
