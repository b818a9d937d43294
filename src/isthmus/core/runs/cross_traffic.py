"""`CrossTraffic`: the traffic of others on the links of a pool, the file of `isthmus simulate --interfering`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from isthmus.core.base_model import FrozenModel, Name, PositiveFloat
from isthmus.core.pool import expand_link_shorthand

MAX_FLOWS = 10_000
"""Most flows of a file."""

Seconds = Annotated[float, Field(ge=0, le=1e9)]
"""A time on the simulator's clock."""


class CrossFlow(FrozenModel):
    """Traffic in one direction of a link: `gbps` for `on_s` seconds, then none for `off_s`, from `start_s` on."""

    source: Name = Field(alias="from")
    target: Name = Field(alias="to")
    gbps: Annotated[PositiveFloat, Field(le=1e9)]
    start_s: Seconds = 0.0
    on_s: Annotated[float, Field(ge=1e-3, le=1e9)] = 1.0
    off_s: Seconds = 0.0


class CrossTraffic(FrozenModel):
    """Traffic of others, with priority over a job's own; `between: [a, b]` stands for both directions."""

    version: Literal[1] = 1
    traffic: Annotated[tuple[CrossFlow, ...], Field(min_length=1, max_length=MAX_FLOWS)]

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("traffic"), list | tuple):
            rows = tuple(one for row in data["traffic"] for one in expand_link_shorthand(row))
            return {**data, "traffic": rows}
        return data

    @model_validator(mode="after")
    def _check_directions(self) -> CrossTraffic:
        seen = set[tuple[str, str]]()
        for one in self.traffic:
            if (one.source, one.target) in seen:
                raise ValueError(f"traffic from {one.source} to {one.target} appears twice; add the rates up")
            seen.add((one.source, one.target))
        return self
