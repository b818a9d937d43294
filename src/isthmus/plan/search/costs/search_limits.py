"""`SearchLimits`: restrictions on a search, by the job or the caller."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.plan.search.costs.framework_rules import FrameworkRules
from isthmus.plan.search.costs.workload import ZeroStage


@dataclass(frozen=True, kw_only=True)
class SearchLimits:
    """Restrictions on a search; None leaves a degree free."""

    # Only plans that the Isthmus runtime supports.
    executable: bool = False
    # Only plans that this framework supports; it implies one pipeline with equal replicas.
    framework: FrameworkRules | None = None
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    cp: int | None = None
    ep: int | None = None
    micro_batch_size: int | None = None
    schedule: str | None = None
    zero: ZeroStage = 1
    max_chips: int | None = None
    mixed_chips: bool = True
    # Largest micro-batch size (samples) to try.
    max_micro_batch_size: int = 8
    # Give all replicas equally many micro-batches (to within one), as most frameworks require.
    equal_micro_batches: bool = False
    # Whether to try schedules that overlap communication with computation.
    overlap: bool = True

    @property
    def even_replicas(self) -> bool:
        """Whether all replicas take equally many micro-batches, to within one."""
        return self.equal_micro_batches or self.framework is not None
