"""Results of a simulation as plain data: per stage, per link, and as timeline spans."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

SpanKind = Literal[
    "forward", "backward", "backward_input", "backward_weight", "update", "bubble", "exchange", "all-reduce"
]


@dataclass(frozen=True, kw_only=True)
class TimelineSpan:
    """A span of a stage's timeline. `exchange` and `all-reduce` are exposed communication."""

    replica: int
    stage: int
    kind: SpanKind
    what: str
    """The operation, as text."""
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class MessageTrace:
    """A message between clusters, and its times."""

    replica: int
    source: str
    target: str
    what: str
    """Its content, as text, such as `gradient(3)` for micro-batch 3."""
    sent_s: float
    """Send."""
    started_s: float
    """Start on the link."""
    left_s: float
    """Departure of the last byte."""
    arrives_s: float
    """Arrival of the last byte."""
    num_bytes: float


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """Time and memory of one stage of one replica.

    `busy_s`, `bubble_s` and `exposed_communication_s` sum to the iteration. Exposed communication is waiting
    for a message or all-reduce in progress, its time in a link queue included; a bubble is any other wait.
    `memory_over_time` is (seconds, bytes) at each change.
    """

    replica: int
    stage: int
    cluster: str
    busy_s: float
    bubble_s: float
    exposed_communication_s: float
    peak_memory_bytes: float
    memory_over_time: tuple[tuple[float, float], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return times and peak memory by name, for JSON."""
        return {
            "busy_s": self.busy_s,
            "bubble_s": self.bubble_s,
            "exposed_communication_s": self.exposed_communication_s,
            "peak_memory_bytes": self.peak_memory_bytes,
        }


@dataclass(frozen=True, kw_only=True)
class LinkResult:
    """Bytes over one direction between two clusters; `utilisation` is bytes over the bytes at full rate."""

    source: str
    target: str
    num_bytes: float
    utilisation: float

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, for JSON."""
        return {
            "from": self.source,
            "to": self.target,
            "bytes": self.num_bytes,
            "utilisation": self.utilisation,
        }


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """The result of one or more simulated iterations; values per stage and link are means per iteration.

    `stages` is ordered by replica, then stage. `critical_path` is the chain of spans that fills the whole
    time. It, `spans` and `message_traces` are empty unless details were requested.
    """

    iteration_s: float
    iterations: int
    stages: tuple[StageResult, ...]
    links: tuple[LinkResult, ...]
    critical_path: tuple[TimelineSpan, ...] = ()
    spans: tuple[TimelineSpan, ...] = ()
    message_traces: tuple[MessageTrace, ...] = ()
    num_events: int = 0

    @property
    def total_s(self) -> float:
        """Seconds of all iterations together."""
        return self.iteration_s * self.iterations

    def as_dict(self, *, details: bool = False) -> dict[str, Any]:
        """Return the result as `isthmus simulate --json` prints it; `details` adds path, spans and memory."""
        answer: dict[str, Any] = {
            "iteration_s": self.iteration_s,
            "stages": [stage.as_dict() for stage in self.stages],
            "links": [link.as_dict() for link in self.links],
        }
        if details:
            answer["critical_path"] = [asdict(span) for span in self.critical_path]
            answer["spans"] = [asdict(span) for span in self.spans]
            answer["memory"] = [[list(point) for point in stage.memory_over_time] for stage in self.stages]
        return answer
