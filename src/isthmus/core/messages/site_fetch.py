"""`SiteFetch`: what a site would have to bring before a job can start there, for the planner."""

from __future__ import annotations

from isthmus.core.base_model import FrozenModel, NonNegativeInt, PositiveFloat

ASSUMED_GBPS = 1.0
"""Rate at which a site is assumed to fetch that has not fetched yet and has no link."""

_BITS_PER_GB = 8 / 1e9


class SiteFetch(FrozenModel):
    """The bytes that a site lacks of a job's model and, where training data is read, of its data sets.

    They come at `gbps`, which is `measured` or else that of the site's fastest link. `lacks_checkpoint`: the job's
    checkpoints are at other sites, which send the parts of this one at `link_gbps`.
    """

    model_bytes: NonNegativeInt = 0
    data_bytes: NonNegativeInt = 0
    gbps: PositiveFloat = ASSUMED_GBPS
    measured: bool = False
    lacks_checkpoint: bool = False
    link_gbps: PositiveFloat = ASSUMED_GBPS

    def num_bytes(self, *, reads_data: bool, checkpoint_bytes: int = 0) -> int:
        """Return the bytes to bring for a part; `checkpoint_bytes` is the size of its checkpoint."""
        data = self.data_bytes if reads_data else 0
        return self.model_bytes + data + (checkpoint_bytes if self.lacks_checkpoint else 0)

    def seconds(self, *, reads_data: bool, checkpoint_bytes: int = 0) -> float:
        """Return the seconds that this takes; the checkpoint comes after the others."""
        files = self.model_bytes + (self.data_bytes if reads_data else 0)
        parts = checkpoint_bytes if self.lacks_checkpoint else 0
        return (files / self.gbps + parts / self.link_gbps) * _BITS_PER_GB
