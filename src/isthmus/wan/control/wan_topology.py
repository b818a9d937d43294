"""`WanTopology`: layers and domains of a deterministic wide-area network, what is booked, and what is asked.

Source: the report on cross-domain pooling, 3.5: a packet layer with any rate, a TDM layer with steps, wavelengths;
domains with their own controllers, joined by gateways.
"""

from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network
from typing import Annotated, Literal

from pydantic import Field, model_validator

from isthmus.core.base_model import Fraction, FrozenModel, Name, NonNegativeFloat, PositiveFloat, PositiveInt

MAX_PIPES = 100_000
MAX_MATCHES = 64
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


class WanNode(FrozenModel):
    """A node whose role matters; those that only pipes name are edge nodes that adapt between all layers."""

    name: Name
    role: Literal["edge", "core"] = "edge"
    """`edge` (PE): requests may begin and end here; `core` (P): only passed."""
    adapts: bool = True
    """Whether a path may come in one layer and leave in another one."""


class WanTopology(FrozenModel):
    """The pipes of all domains, and what is special of nodes."""

    pipes: Annotated[tuple[WanPipe, ...], Field(max_length=MAX_PIPES)]
    nodes: Annotated[tuple[WanNode, ...], Field(max_length=MAX_PIPES)] = ()
    bulk_share: Fraction = 0.5

    @model_validator(mode="after")
    def _names_are_unique(self) -> WanTopology:
        if len({pipe.name for pipe in self.pipes}) != len(self.pipes):
            raise ValueError("two pipes have the same name")
        if len({node.name for node in self.nodes}) != len(self.nodes):
            raise ValueError("two nodes have the same name")
        return self


class FlowMatch(FrozenModel):
    """Packets of a request as its edge sees them: those that meet everything stated. At least one must be stated."""

    to_network: IPv4Network | IPv6Network | None = None
    from_network: IPv4Network | IPv6Network | None = None
    protocol: Literal["tcp", "udp"] | None = None
    to_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    from_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Ports need a protocol."""

    @model_validator(mode="after")
    def _states_something(self) -> FlowMatch:
        if self.to_network is None and self.from_network is None and self.protocol is None:
            raise ValueError("a match of every packet; state to_network, from_network or protocol")
        if (self.to_port or self.from_port) is not None and self.protocol is None:
            raise ValueError("a port needs a protocol, tcp or udp")
        if self.to_network and self.from_network and self.to_network.version != self.from_network.version:
            raise ValueError("to_network and from_network are of two versions of IP")
        return self

    @property
    def version(self) -> int | None:
        """Return 4 or 6, or None if the match holds for both."""
        network = self.to_network or self.from_network
        return network.version if network else None


class PathBounds(FrozenModel):
    """What every request states: its ends, its flows at the edge, and bounds on the quality of its path."""

    name: Name
    source: Name = Field(alias="from")
    target: Name = Field(alias="to")
    max_delay_ms: PositiveFloat = 1e9
    max_jitter_ms: NonNegativeFloat = 1e9
    max_loss: Fraction = 1.0
    flows: Annotated[tuple[FlowMatch, ...], Field(max_length=MAX_MATCHES)] = ()
    """Which packets the edge sends at the booked rate."""


class PathRequest(PathBounds):
    """Bandwidth from `start_s` to `end_s` on one path, with bounds on its quality."""

    bandwidth_gbps: PositiveFloat
    service: ServiceClass = "training"
    start_s: NonNegativeFloat = 0.0
    end_s: PositiveFloat = 1e18

    @model_validator(mode="after")
    def _lasts(self) -> PathRequest:
        if self.end_s <= self.start_s:
            raise ValueError(f"it ends at {self.end_s} s, not after its start at {self.start_s} s")
        return self


class TransferRequest(PathBounds):
    """A data set, checkpoint or model that is to arrive by a deadline, in the class `bulk`, at whatever rate fits."""

    num_bytes: PositiveInt
    start_s: NonNegativeFloat = 0.0
    """When its bytes are there."""
    deadline_s: PositiveFloat
    max_gbps: PositiveFloat = 1e6
    """The most that its ends send and take."""

    @model_validator(mode="after")
    def _has_time(self) -> TransferRequest:
        if self.deadline_s <= self.start_s:
            raise ValueError(f"its deadline at {self.deadline_s} s is not after its start at {self.start_s} s")
        return self


class Booking(FrozenModel):
    """An admitted request: the pipes in order, and the rate on each, rounded up to its step."""

    request: PathRequest
    pipes: tuple[Name, ...]
    rates_gbps: tuple[float, ...]
    delay_ms: float
    jitter_ms: float
    loss: float


class TransferSegment(FrozenModel):
    """A time in which a transfer sends at one rate."""

    start_s: float
    end_s: float
    gbps: float


class TransferBooking(FrozenModel):
    """An admitted transfer: the pipes in order, and its rate over time, which adds up to its bytes."""

    request: TransferRequest
    pipes: tuple[Name, ...]
    segments: tuple[TransferSegment, ...]
    end_s: float
    """When its last byte is sent."""
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
    """A topology, what is booked, and what is asked, in order: requests of bandwidth, then transfers."""

    topology: WanTopology
    booked: Annotated[tuple[Booking, ...], Field(max_length=MAX_PIPES)] = ()
    booked_transfers: Annotated[tuple[TransferBooking, ...], Field(max_length=MAX_PIPES)] = ()
    requests: Annotated[tuple[PathRequest, ...], Field(max_length=MAX_PIPES)] = ()
    transfers: Annotated[tuple[TransferRequest, ...], Field(max_length=MAX_PIPES)] = ()
    down: Annotated[tuple[Name, ...], Field(max_length=MAX_PIPES)] = ()
    """Pipes that have failed: what was booked on them is moved first, training before transfers."""


class Admission(FrozenModel):
    """What became of the bookings and requests of a file."""

    admitted: tuple[Booking, ...]
    refused: tuple[PathRefusal, ...]
    booked: tuple[Booking, ...]
    """All bookings of bandwidth, earlier ones first."""
    transfers: tuple[TransferBooking, ...] = ()
    """Transfers that were admitted now."""
    booked_transfers: tuple[TransferBooking, ...] = ()
    moved: tuple[Name, ...] = ()
    """Bookings that have another path, because a pipe of theirs is down."""

    @property
    def all_booked(self) -> tuple[Booking | TransferBooking, ...]:
        """Return all bookings, of bandwidth first."""
        found: list[Booking | TransferBooking] = [*self.booked, *self.booked_transfers]
        return tuple(found)
