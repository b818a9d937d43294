"""Fixtures of the attacks."""

from __future__ import annotations

from tests.control.conftest import server

__all__ = ["server"]
