"""Fixtures of the attacks."""

from __future__ import annotations

import pytest

from tests.attack.fuzzing import Fuzz
from tests.control.conftest import server

__all__ = ["fuzz", "server"]


@pytest.fixture
def fuzz(request: pytest.FixtureRequest, whole: bool) -> Fuzz:
    """Return how long this run fuzzes a parser (`--whole`, `--fuzz-s`)."""
    return Fuzz(whole, request.config.getoption("--fuzz-s"))
