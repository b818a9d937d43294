"""`PlanRequest`: what the server asks a planner's process; it needs nothing of the planner itself."""

from __future__ import annotations

from pydantic import Field

from isthmus.core.base_model import FrozenModel
from isthmus.core.job import Job
from isthmus.core.messages.site_fetch import SiteFetch
from isthmus.core.model import Model
from isthmus.core.pool import Pool


class PlanRequest(FrozenModel):
    """A job and the free resources. Storage and links that are not named are free as in the pool."""

    job: Job
    model: Model
    pool: Pool
    # By cluster and node group.
    free_chips: dict[str, dict[str, int]]
    # By cluster.
    free_storage_bytes: dict[str, int] = Field(default_factory=dict)
    # By link, `FROM>TO`.
    free_gbps: dict[str, float] = Field(default_factory=dict)
    # What clusters would have to bring first; those without an entry nothing.
    fetches: dict[str, SiteFetch] = Field(default_factory=dict)
    # Only plans that the Isthmus runtime supports.
    executable: bool = True
