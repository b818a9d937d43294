"""`StorageFilter`: checks that clusters can store the data set, checkpoints and model files of their stages.

Cross-domain pooling report 4.2.3 (3): needs are summed per cluster over all of its stages.
"""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.control.placement.resources.free_resources import FreeResources
from isthmus.control.placement.resources.pipeline_requirement import PipelineRequirement, StageRange
from isthmus.core.plan import Refusal
from isthmus.core.units import format_bytes


class StorageFilter:
    """Checks ranges and records the smallest need of each refused cluster, in bytes."""

    def __init__(self, requirement: PipelineRequirement, resources: FreeResources) -> None:
        self.requirement, self.resources = requirement, resources
        self._refused: dict[str, int] = {}

    def can_store(self, placed: Sequence[StageRange]) -> bool:
        """Return whether the cluster of the last range has storage for all its ranges in `placed`."""
        where = placed[-1].cluster
        site = self.resources.sites[where]
        free = site.free_storage_bytes
        if free is None:
            return True
        here = [(one.first, one.last) for one in placed if one.cluster == where]
        needed = self.requirement.storage_bytes(here, has_data=site.has_data)
        if needed <= free:
            return True
        self._refused[where] = min(needed, self._refused.get(where, needed))
        return False

    def refusals(self) -> list[Refusal]:
        """Return a refusal for each cluster that lacked storage, by name."""
        return [self._refusal(where, needed) for where, needed in sorted(self._refused.items())]

    def _refusal(self, where: str, needed: int) -> Refusal:
        site = self.resources.sites[where]
        free = site.free_storage_bytes or 0
        return Refusal(
            clusters=(where,),
            stage="storage",
            owner=site.owner,
            lacking_bytes=needed - free,
            reason=f"storage: {where} ({site.owner}) lacks {format_bytes(needed - free)}: data, checkpoints "
            f"and model files need at least {format_bytes(needed)}, {format_bytes(free)} is free",
        )
