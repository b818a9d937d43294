"""`DeltaError`: a delta, or a file of weights, that cannot be used."""

from __future__ import annotations

from isthmus.core.errors import InputError


class DeltaError(InputError):
    """A delta that is damaged, cut short or made for another base, or a file that is no safetensors file."""


def damaged(detail: str) -> DeltaError:
    """Return the error of a delta whose bytes cannot be those that were written."""
    return DeltaError(f"the delta is damaged: {detail}", hint="fetch it again")
