"""`FieldProblem`: a field of a job whose value is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FieldProblem:
    """What is wrong with a field (dotted name), its value, and what to do: where it exists, the nearest valid value."""

    field: str
    value: Any
    message: str
    hint: str


def too_large(field: str, value: float, limit_name: str, limit: float) -> FieldProblem:
    """Return the problem of a number above its limit, which is the nearest valid value."""
    return FieldProblem(field, value, f"{value} exceeds {limit_name}, {limit}", f"nearest valid value: {limit}")
