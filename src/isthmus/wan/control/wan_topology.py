"""`WanTopology`: layers and domains of a deterministic wide-area network, what is booked, and what is asked.

Source: the report on cross-domain pooling, 3.5: a packet layer with any rate, a TDM layer with steps, wavelengths;
domains with their own controllers, joined by gateways.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from isthmus.core.base_model import Fraction, FrozenModel, Name, NonNegativeFloat, PositiveFloat

MAX_PIPES = 100_000
Layer = Literal["packet", "tdm", "wavelength"]
ServiceClass = Literal["training", "bulk"]
"""`bulk`, for data sets, checkpoints and models, takes at most `bulk_share` of a pipe."""


class WanPipe(FrozenModel):
    """A directed link of one layer between two nodes."""

    name: Name
    source: Name = Field(alias="from")
    target: Name = Field(alias="to")
    layer: Layer = "packet"
    domain: Name = "one"
    capacity_gbps: PositiveFloat
    step_gbps: NonNegativeFloat = 0.0
    """Rates are multiples of it: of a slot in TDM, the whole capacity for a wavelength; 0 for any rate."""
    delay_ms: NonNegativeFloat = 0.0
    jitter_ms: NonNegativeFloat = 0.0
    loss: Fraction = 0.0


class WanTopology(FrozenModel):
    """The pipes of all domains."""

    pipes: Annotated[tuple[WanPipe, ...], Field(max_length=MAX_PIPES)]
    bulk_share: Fraction = 0.5

    @model_validator(mode="after")
    def _names_are_unique(self) -> WanTopology:
        if len({pipe.name for pipe in self.pipes}) != len(self.pipes):
            raise ValueError("two pipes have the same name")
        return self


class PathRequest(FrozenModel):
    """Bandwidth from `start_s` to `end_s` on one path, with bounds on its quality."""

    name: Name
    source: Name = Field(alias="from")
    target: Name = Field(alias="to")
    bandwidth_gbps: PositiveFloat
    service: ServiceClass = "training"
    max_delay_ms: PositiveFloat = 1e9
    max_jitter_ms: NonNegativeFloat = 1e9
    max_loss: Fraction = 1.0
    start_s: NonNegativeFloat = 0.0
    end_s: PositiveFloat = 1e18

    @model_validator(mode="after")
    def _lasts(self) -> PathRequest:
        if self.end_s <= self.start_s:
            raise ValueError(f"it ends at {self.end_s} s, not after its start at {self.start_s} s")
        return self


class Booking(FrozenModel):
    """An admitted request: the pipes in order, and the rate on each, rounded up to its step."""

    request: PathRequest
    pipes: tuple[Name, ...]
    rates_gbps: tuple[float, ...]
    delay_ms: float
    jitter_ms: float
    loss: float


class PathRefusal(FrozenModel):
    """Why there is no path."""

    name: Name
    reason: str
    nearest_gbps: float
    """The most bandwidth that a path within the other bounds has in the whole time; 0 if there is no such path."""


class AdmissionFile(FrozenModel):
    """A topology, what is booked, and what is asked, in order."""

    topology: WanTopology
    booked: Annotated[tuple[Booking, ...], Field(max_length=MAX_PIPES)] = ()
    requests: Annotated[tuple[PathRequest, ...], Field(max_length=MAX_PIPES)] = ()


class Admission(FrozenModel):
    """What became of the requests of a file."""

    admitted: tuple[Booking, ...]
    refused: tuple[PathRefusal, ...]
    booked: tuple[Booking, ...]
    """All bookings, earlier ones first."""
