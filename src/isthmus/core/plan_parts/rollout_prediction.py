"""`RolloutPrediction`: what a step of a job with `task: rl` is made of, as predicted."""

from __future__ import annotations

from pydantic import Field

from isthmus.core.base_model import FrozenModel, Name, NonNegativeFloat, NonNegativeInt, PositiveInt


class SitePrediction(FrozenModel):
    """Predicted seconds of a step at a cluster that decodes, the mean of its ranks, by what they do."""

    cluster: Name
    ranks: PositiveInt
    sequences: PositiveInt
    tokens_per_s: NonNegativeFloat
    decode_s: NonNegativeFloat
    wait_samples_s: NonNegativeFloat
    wait_weights_s: NonNegativeFloat
    # The clusters that a version passes on its way, the first has trained it; () decodes where it is trained.
    weights_way: tuple[Name, ...] = ()


class RolloutPrediction(FrozenModel):
    """`Prediction.iteration_s` is a whole step; `train_s` of it trains, `wait_samples_s` waits for samples.

    `weights_bytes` is a version as it is sent, `link_bytes` what a step sends over each link (`FROM>TO`). `staleness`
    is the mean number of versions between sampling and training. `other_staleness_s` are the seconds of a step under
    other bounds `max_staleness` of the job.
    """

    train_s: NonNegativeFloat
    wait_samples_s: NonNegativeFloat
    staleness: NonNegativeFloat
    sites: tuple[SitePrediction, ...] = ()
    weights_bytes: NonNegativeInt = 0
    link_bytes: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    other_staleness_s: dict[NonNegativeInt, NonNegativeFloat] = Field(default_factory=dict)
