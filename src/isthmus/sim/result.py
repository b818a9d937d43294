"""What a simulated iteration was like, as plain data: per stage, per link, span by span."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

SpanKind = Literal[
    "forward", "backward", "backward_input", "backward_weight", "update", "bubble", "exchange", "all-reduce"
]


@dataclass(frozen=True, kw_only=True)
class Span:
    """A piece of a stage's time. `exchange` and `all-reduce` are communication that computing waits for."""

    replica: int
    stage: int
    kind: SpanKind
    what: str
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Flight:
    """A message on a link: handed over, on its wire, its last byte sent, arrived (seconds)."""

    replica: int
    source: str
    target: str
    what: str
    sent_s: float
    started_s: float
    left_s: float
    arrives_s: float
    num_bytes: float


@dataclass(frozen=True, kw_only=True)
class StageRun:
    """What one stage of one replica did. `busy_s`, `bubble_s` and `exposed_communication_s` sum to the
    iteration.

    Exposed communication is waiting while what is waited for is under way, queues on its wire included; a
    bubble is every other wait. `memory` is (time, bytes) at each change.
    """

    replica: int
    stage: int
    cluster: str
    busy_s: float
    bubble_s: float
    exposed_communication_s: float
    peak_memory_bytes: float
    memory: tuple[tuple[float, float], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the figures by name, without the memory over time."""
        return {
            "busy_s": self.busy_s,
            "bubble_s": self.bubble_s,
            "exposed_communication_s": self.exposed_communication_s,
            "peak_memory_bytes": self.peak_memory_bytes,
        }


@dataclass(frozen=True, kw_only=True)
class LinkRun:
    """What one direction between two clusters carried; `utilisation` is bytes over what it could move."""

    source: str
    target: str
    num_bytes: float
    utilisation: float

    def as_dict(self) -> dict[str, Any]:
        """Return the figures by name."""
        return {
            "from": self.source,
            "to": self.target,
            "bytes": self.num_bytes,
            "utilisation": self.utilisation,
        }


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """One or more simulated iterations; figures per stage and link are the mean of an iteration.

    `stages` are replica by replica, first stage first. `critical_path` is the chain of spans, first to last,
    that fills the whole time. It, `spans` and `flights` are empty unless details were asked for.
    """

    iteration_s: float
    iterations: int
    stages: tuple[StageRun, ...]
    links: tuple[LinkRun, ...]
    critical_path: tuple[Span, ...] = ()
    spans: tuple[Span, ...] = ()
    flights: tuple[Flight, ...] = ()
    num_events: int = 0

    @property
    def total_s(self) -> float:
        """Seconds of all iterations together."""
        return self.iteration_s * self.iterations

    def as_dict(self, *, details: bool = False) -> dict[str, Any]:
        """Return the run as `isthmus simulate --json` prints it; `details` adds path, spans and memory."""
        answer: dict[str, Any] = {
            "iteration_s": self.iteration_s,
            "stages": [stage.as_dict() for stage in self.stages],
            "links": [link.as_dict() for link in self.links],
        }
        if details:
            answer["critical_path"] = [asdict(span) for span in self.critical_path]
            answer["spans"] = [asdict(span) for span in self.spans]
            answer["memory"] = [[list(point) for point in stage.memory] for stage in self.stages]
        return answer
