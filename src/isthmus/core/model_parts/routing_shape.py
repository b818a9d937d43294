"""`RoutingShape`: how many experts a model chooses for a token, and the bytes that the choices take."""

from __future__ import annotations

from typing import NamedTuple


class RoutingShape(NamedTuple):
    """Layers with a router, the experts that each of them chooses for a token, and the experts to choose from."""

    num_layers: int
    num_chosen: int
    num_experts: int

    @property
    def number_type(self) -> str:
        """Return the numpy type of an expert's number."""
        return "<u1" if self.num_experts <= 256 else "<u2"

    @property
    def row_bytes(self) -> int:
        """Return the bytes of the choices for one token."""
        return self.num_layers * self.num_chosen * int(self.number_type[-1])
