"""`StageDegrees`: over how many chips a stage is shared, and how these exchange what they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from isthmus.core.errors import PlanError
from isthmus.core.plan_parts.expert_exchange import ExpertExchange
from isthmus.plan.profile.component import Sharding
from isthmus.plan.profile.layer_profile import LayerProfile

_DEFAULT_EXCHANGE = ExpertExchange()


@dataclass(frozen=True, kw_only=True)
class StageDegrees:
    """The degrees of parallelism of one stage.

    Tensor parallelism shards experts only without expert parallelism (`ep` 1).
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    sp: bool = False
    zero: Literal[0, 1, 2, 3] = 0
    cp_kind: Literal["gather", "ring", "all_to_all"] = "gather"
    cp_rates: tuple[float, ...] = ()
    """Rates of the chips that share a sequence over the fastest one's; empty: equal ones."""
    experts: ExpertExchange = _DEFAULT_EXCHANGE
    """How tokens reach their experts."""
    narrow_dispatch: bool = False
    """Whether tokens go to their experts in 8 bits."""
    overlap_tp: bool | None = None
    """Whether tensor-parallel exchanges run beside products; None: backward, beside weight gradients alone."""
    shard_replicas: int | None = None
    """Replicas over which ZeRO shards; None: all."""
    reshard: bool = True
    """Whether ZeRO 3 drops gathered weights after the forward pass."""

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "ep", "dp", "shard_replicas"):
            degree = getattr(self, name)
            if degree is not None and degree < 1:
                raise PlanError(f"{name} is {getattr(self, name)}", hint="a degree must be at least 1")

    @property
    def sequence_parts(self) -> float:
        """Number of chips of the fastest one's rate that would compute a sequence in the same time.

        One of them, the fastest of the stage, has a `1 / sequence_parts` of the tokens, and no other more.
        """
        return sum(self.cp_rates) or self.cp

    @property
    def etp(self) -> int:
        """Tensor parallelism of each expert."""
        return self.tp if self.ep == 1 else 1

    @property
    def sharding_dp(self) -> int:
        """Number of replicas over which ZeRO shards."""
        return min(self.dp, self.shard_replicas or self.dp)

    @property
    def expert_dp(self) -> int:
        """Number of chips that hold the same experts, of those over which ZeRO shards."""
        return max(1, self.sharding_dp * self.cp * self.tp // (self.ep * self.etp))

    def zero_shards(self, stage: int, *, expert: bool = False) -> int:
        """Return over how many chips ZeRO `stage` shards its state: optimizer 1, gradients 2, weights 3."""
        if self.zero < stage:
            return 1
        return self.expert_dp if expert else self.sharding_dp * self.cp

    def sharding(self, layer: LayerProfile, imbalance: float = 0.0) -> Sharding:
        """Return the sharding of `layer`, with routing from balanced (`imbalance` 0) to worst case (1).

        Balanced routing sends `experts_per_token` routed copies of each token to this chip; in the worst case
        all tokens of the `ep` chips go to its experts: min(experts_per_token, experts on this chip) x ep.
        """
        part, routed = layer.feed_forward, None
        if part.num_experts:
            here = -(-part.num_experts // self.ep)
            worst = min(part.experts_per_token, here) * self.ep
            routed = part.experts_per_token + imbalance * (worst - part.experts_per_token)
        return Sharding(tp=self.tp, sp=self.sp, ep=self.ep, etp=self.etp, routed_per_token=routed)
