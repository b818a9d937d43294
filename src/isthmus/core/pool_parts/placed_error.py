"""`PlacedError`: a contradiction in a file, with the way to its field."""

from __future__ import annotations


class PlacedError(ValueError):
    """`place` leads from the model that raises it to the field that is wrong; `hint` says what to write instead."""

    def __init__(self, message: str, place: tuple[str | int, ...], hint: str | None = None) -> None:
        super().__init__(message)
        self.place, self.hint = place, hint
