"""`Plan`: one way to run a job; `PlanPart`: its share at one cluster. See `docs/formats.md`."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from isthmus.core.base_model import (
    AttentionKernelName,
    ComputeMode,
    Currency,
    FrozenModel,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    TrainingPrecision,
)
from isthmus.core.chip import Precision
from isthmus.core.plan_parts.activation_offload import ActivationOffload
from isthmus.core.plan_parts.equal_stages import with_equal_stages
from isthmus.core.plan_parts.expert_exchange import ExpertExchange
from isthmus.core.plan_parts.kernel_choice import KernelChoice
from isthmus.core.plan_parts.low_rank_adapters import LowRankAdapters
from isthmus.core.plan_parts.rank_numbering import number_stages
from isthmus.core.plan_parts.recompute_module import RecomputeModule
from isthmus.core.plan_parts.rollout_place import RolloutPlace
from isthmus.core.plan_parts.rollout_prediction import RolloutPrediction
from isthmus.core.plan_parts.shard_group import ShardGroup
from isthmus.core.plan_parts.stage_orders import StageOrders
from isthmus.core.plan_parts.tensor_formats import TensorFormats
from isthmus.core.pool_resource import KBPS_PER_GBPS, PoolResource
from isthmus.core.stack import StackChoice

MAX_STAGES = 100_000
"""Most stages that the shorthand of equal replicas may stand for."""

MAX_ROLLOUTS = 4096
"""Most ranks of a plan that decode."""

LayerRange = Annotated[tuple[NonNegativeInt, NonNegativeInt], Field(description="first layer, last layer exclusive")]


class Stage(FrozenModel):
    """One pipeline stage of one replica: decoder layers `[first, last)` on `tp` x `cp` chips of a node group.

    The first stage of a replica also holds the embedding, the last one the final norm and the head. `tp` is
    the tensor-parallel degree (`sp` adds sequence parallelism), `cp` the context-parallel degree; `ep`
    distributes experts over the chips of this stage and of other replicas. `recompute` applies to the first
    `recompute_layers` layers (default: all); `recompute_modules` says which parts of a layer `selective` repeats
    (default: as the stack does).

    `cp_kind` is how chips that share a sequence exchange it: `gather` gathers keys and values, `ring` passes them
    round behind the computation, `all_to_all` exchanges tokens for heads (Ulysses). `cp_rates` are the rates at which
    unlike chips compute, 1 for the fastest: each shares the sequence in proportion (default: equally). `offload` keeps
    activations in host memory. `precision` is that of the stage, where it differs from the job's: chips that lack one
    compute in another.
    """

    replica: NonNegativeInt = 0
    cluster: Name
    node_group: Name
    layers: LayerRange
    tp: PositiveInt = 1
    cp: PositiveInt = 1
    cp_kind: Literal["gather", "ring", "all_to_all"] = "gather"
    cp_rates: Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(max_length=1024)] = ()
    ep: PositiveInt = 1
    sp: bool = False
    recompute: Literal["none", "selective", "full", "moe"] = "none"
    recompute_layers: NonNegativeInt | None = None
    recompute_modules: Annotated[tuple[RecomputeModule, ...], Field(max_length=7)] = ()
    offload: ActivationOffload | None = None
    precision: TrainingPrecision | None = None

    @model_validator(mode="after")
    def _check_rates(self) -> Stage:
        if self.cp_rates and (len(self.cp_rates) != self.cp or max(self.cp_rates) != 1):
            raise ValueError(
                f"cp_rates {list(self.cp_rates)} with cp {self.cp}: give one for each part of the sequence, 1 for the "
                "fastest"
            )
        if self.cp_rates and self.cp_kind == "all_to_all":
            raise ValueError("cp_rates with cp_kind all_to_all, which deals heads equally: choose ring or gather")
        return self

    @property
    def num_layers(self) -> int:
        """Number of decoder layers of the stage."""
        return self.layers[1] - self.layers[0]

    @property
    def num_chips(self) -> int:
        """Number of chips of the stage."""
        return self.tp * self.cp


@dataclass(frozen=True)
class RankAssignment:
    """The work of one rank: a stage, its tensor-parallel shard and its share of the tokens."""

    # Index into `Plan.stages`.
    stage: int
    # Tensor-parallel rank, from 0.
    tp: int = 0
    # Context-parallel rank, from 0.
    cp: int = 0


class StageTime(FrozenModel):
    """Predicted seconds of one stage: per micro-batch forward and backward, per step `update_s`.

    `update_s` covers gradient reduction inside the cluster and the optimizer update.
    """

    forward_s: NonNegativeFloat
    backward_s: NonNegativeFloat
    update_s: NonNegativeFloat = 0.0


class Prediction(FrozenModel):
    """Predicted performance of a plan. Lists are per stage; `wan_gbps` is per hop (`all_hops`).

    `gradient_gbps` maps `FROM>TO` to the mean gradient rate between clusters that hold the same layers.
    `storage_bytes` is what each stage adds at its cluster; data shared by its stages counts once.
    `mfu_fraction` is the model FLOPs utilisation without recomputation (0: not predicted), `currency` the unit of
    `cost_per_iteration` as the pool file names it. `bring_bytes` are those of the job's model, data and checkpoint that
    clusters must bring before the start, which takes `bring_s`. `rollouts` belongs to jobs with `task: rl`.
    """

    iteration_s: NonNegativeFloat
    tgs_tokens_per_card_s: NonNegativeFloat
    samples_per_s: NonNegativeFloat
    peak_memory_bytes: tuple[NonNegativeInt, ...]
    storage_bytes: tuple[NonNegativeInt, ...] = ()
    wan_gbps: tuple[NonNegativeFloat, ...] = ()
    gradient_gbps: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    cost_per_iteration: NonNegativeFloat = 0.0
    currency: Currency = ""
    mfu_fraction: NonNegativeFloat = 0.0
    stage_times: tuple[StageTime, ...] = ()
    bring_bytes: dict[Name, NonNegativeInt] = Field(default_factory=dict)
    bring_s: NonNegativeFloat = 0.0
    rollouts: RolloutPrediction | None = None
    assumptions: tuple[str, ...] = ()


class Plan(FrozenModel):
    """A way to run a job: the layers of each stage, the schedule, and the predicted performance.

    A hand-written plan may also set: `model` (a folder or `config.json`), `precision` (default bf16), the
    ZeRO stage, a number of micro-batches per replica (`replica_micro_batches`), a micro-batch size per
    replica (`replica_micro_batch_sizes`; `micro_batch_size` is the largest), the warm-up per stage of an
    overlapped schedule (`warm_up`), the model chunks per stage of an interleaved or searched schedule (`chunks`),
    the computations of each stage under a searched schedule (`orders`), whether a send blocks until its receive
    (`rendezvous`, like NCCL), and whether gradient reduction overlaps the last backward (`overlap_gradients`).

    `optimizer_on_host` keeps fp32 weights and moments in host memory and updates them there. `reference_model` keeps a
    frozen copy of the first weights beside them (`kl` of the job).

    `attention`, `compile` and `deterministic` are those of the job's `training`; if a plan states them, they must be
    equal.

    With `local_steps` above 1 gradients are reduced only within a replica group (replicas that share a
    cluster); after `local_steps` steps an outer optimizer averages all parameters.
    `compute: virtual` belongs to jobs of that kind, and to those with `engine: command`: each stage is one process,
    whatever its degrees.

    `stack` is the training framework that the plan is for: `isthmus` is this project's runtime, which runs no other's
    plans. It decides which tensors a chip keeps and what is fused and overlapped; see `isthmus schema stack`.

    `experts`, `sharding`, `kernels`, `formats` and `lora` say how the run does what its degrees ask for.
    `overlap_tp` runs tensor-parallel exchanges beside the products before and after them; `false` hides none of them
    (default: those of the backward pass hide behind weight gradients). `packed_tokens` is the length of the documents
    that share a sequence, weighted by their tokens: attention stays inside a document.

    `equal_replicas: true` lists the stages of replica 0 alone: all `dp` replicas are like it. `equal_stages: 16` lists
    one stage with all layers, which 16 stages share evenly.

    `rollouts` are the ranks of a job with `task: rl` that decode, numbered after those that train.

    `rank_order: cluster` gives each cluster a contiguous segment of ranks; `stage` numbers the ranks in the order of
    the stages, as in plans that earlier releases stored.
    """

    version: Literal[1] = 1
    id: Name
    stages: tuple[Stage, ...] = Field(min_length=1)
    dp: PositiveInt = 1
    micro_batches: PositiveInt
    micro_batch_size: PositiveInt
    sequence_length: PositiveInt
    schedule: Name = "1f1b"
    predicted: Prediction | None = None
    why: str = ""
    model: str | None = None
    precision: Precision | None = None
    attention: AttentionKernelName | None = None
    compile: bool | None = None
    deterministic: bool | None = None
    zero: Literal[0, 1, 2, 3] = 0
    optimizer_on_host: bool = False
    reference_model: bool = False
    replica_micro_batches: tuple[PositiveInt, ...] = ()
    replica_micro_batch_sizes: tuple[PositiveInt, ...] = ()
    local_steps: PositiveInt = 1
    warm_up: tuple[NonNegativeInt, ...] = ()
    chunks: PositiveInt | None = None
    orders: tuple[StageOrders, ...] = ()
    transport: Literal["buffered", "rendezvous"] = "buffered"
    overlap_gradients: bool = False
    compute: ComputeMode = "real"
    stack: StackChoice = "isthmus"
    experts: ExpertExchange | None = None
    sharding: ShardGroup | None = None
    kernels: KernelChoice | None = None
    formats: TensorFormats | None = None
    lora: LowRankAdapters | None = None
    overlap_tp: bool | None = None
    packed_tokens: PositiveInt | None = None
    rollouts: Annotated[tuple[RolloutPlace, ...], Field(max_length=MAX_ROLLOUTS)] = ()
    rank_order: Literal["cluster", "stage"] = "cluster"

    @model_validator(mode="before")
    @classmethod
    def _expand_replicas(cls, data: Any) -> Any:
        """Expand `equal_stages`, and `equal_replicas`: the stages listed, repeated as they are for `dp` replicas."""
        if isinstance(data, dict) and "equal_stages" in data:
            data = with_equal_stages(data, MAX_STAGES)
        if not isinstance(data, dict) or "equal_replicas" not in data:
            return data
        fields = {key: value for key, value in data.items() if key != "equal_replicas"}
        if data["equal_replicas"] is False:
            return fields
        if data["equal_replicas"] is not True:
            raise ValueError("equal_replicas is true or false")
        stages, dp = fields.get("stages"), fields.get("dp", 1)
        if not isinstance(stages, list | tuple) or not isinstance(dp, int) or isinstance(dp, bool):
            return fields  # their own checks say what is wrong
        if not all(isinstance(stage, dict) and not stage.get("replica") for stage in stages):
            raise ValueError("equal_replicas: list the stages of replica 0 alone")
        if dp < 1 or dp * len(stages) > MAX_STAGES:
            raise ValueError(f"equal_replicas: {dp} replicas of {len(stages)} stages; at most {MAX_STAGES:,} stages")
        fields["stages"] = [{**stage, "replica": replica} for replica in range(dp) for stage in stages]
        return fields

    def as_document(self) -> dict[str, Any]:
        """Return the plan as a file holds it: without defaults, equal replicas written once (`equal_replicas`)."""
        document = self.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        first = [stage.model_dump(exclude={"replica"}) for stage in self.pipeline(0)]
        rows = ([one.model_dump(exclude={"replica"}) for one in self.pipeline(n)] for n in range(1, self.dp))
        grouped = [stage.replica for stage in self.stages] == sorted(stage.replica for stage in self.stages)
        if self.dp > 1 and grouped and all(row == first for row in rows):
            document["stages"] = document["stages"][: len(first)]
            document["equal_replicas"] = True
        return document

    @model_validator(mode="after")
    def _check_layers(self) -> Plan:
        replicas = sorted({stage.replica for stage in self.stages})
        if replicas != list(range(self.dp)):
            raise ValueError(f"dp is {self.dp}, but the stages have replicas {replicas}")
        ends = set()
        for replica in replicas:
            expected = 0
            for stage in self.pipeline(replica):
                first, last = stage.layers
                if first != expected or last <= first:
                    raise ValueError(
                        f"replica {replica}: layers {[first, last]} must start at {expected}; "
                        "each stage has at least one layer and starts where the previous one ends"
                    )
                expected = last
            ends.add(expected)
        if len(ends) != 1:
            raise ValueError(f"replicas end at different layers: {sorted(ends)}")
        return self

    @model_validator(mode="after")
    def _check_list_lengths(self) -> Plan:
        for name in ("replica_micro_batches", "replica_micro_batch_sizes"):
            entries = getattr(self, name)
            if entries and len(entries) != self.dp:
                raise ValueError(f"{name} has {len(entries)} entries for dp {self.dp}")
        if self.replica_micro_batch_sizes and max(self.replica_micro_batch_sizes) != self.micro_batch_size:
            raise ValueError(
                f"micro_batch_size is {self.micro_batch_size}, but the largest of replica_micro_batch_sizes "
                f"is {max(self.replica_micro_batch_sizes)}"
            )
        if self.warm_up and any(len(self.pipeline(r)) != len(self.warm_up) for r in range(self.dp)):
            raise ValueError(f"warm_up has {len(self.warm_up)} entries; give one per stage")
        return self

    @model_validator(mode="after")
    def _check_orders(self) -> Plan:
        if self.orders and self.schedule != "searched":
            raise ValueError(f"orders belong to schedule searched, not to {self.schedule}")
        listed = [replica for one in self.orders for replica in one.replicas or range(self.dp)]
        if self.orders and sorted(listed) != list(range(self.dp)):
            raise ValueError(f"orders list the replicas {listed}; list each of the {self.dp} once")
        for one in self.orders:
            for replica in one.replicas or range(self.dp):
                if len(one.stages) != len(self.pipeline(replica)):
                    count = len(self.pipeline(replica))
                    raise ValueError(f"orders of {len(one.stages)} stages for replica {replica}, which has {count}")
        return self

    @model_validator(mode="after")
    def _check_local_steps(self) -> Plan:
        if self.local_steps > 1 and len(set(self.replica_groups)) < 2:
            raise ValueError(
                f"local_steps is {self.local_steps}, but all replicas are in one group and reduce gradients "
                "every step; set it to 1"
            )
        return self

    @property
    def num_layers(self) -> int:
        """Number of decoder layers of the model."""
        return max(stage.layers[1] for stage in self.stages)

    @property
    def clusters(self) -> tuple[str, ...]:
        """Clusters in order of first use by a stage, then those that only decode."""
        trains = dict.fromkeys(stage.cluster for stage in self.stages)
        return tuple(trains | dict.fromkeys(place.cluster for place in self.rollouts))

    def micro_batches_of(self, replica: int) -> int:
        """Return the micro-batches per step of a replica."""
        return self.replica_micro_batches[replica] if self.replica_micro_batches else self.micro_batches

    def micro_batch_size_of(self, replica: int) -> int:
        """Return the samples per micro-batch of a replica."""
        sizes = self.replica_micro_batch_sizes
        return sizes[replica] if sizes else self.micro_batch_size

    def orders_of(self, replica: int) -> tuple[str, ...]:
        """Return the text of each stage's computations of a replica; empty if the plan keeps none."""
        return next((one.stages for one in self.orders if not one.replicas or replica in one.replicas), ())

    @property
    def num_samples(self) -> int:
        """Samples per step over all replicas (the global batch size)."""
        return sum(self.micro_batches_of(r) * self.micro_batch_size_of(r) for r in range(self.dp))

    @cached_property
    def replica_groups(self) -> tuple[int, ...]:
        """Group number of each replica, from 0; sharing a cluster, also transitively, makes a group."""
        return group_replicas_by_cluster([{stage.cluster for stage in self.pipeline(r)} for r in range(self.dp)])

    def pipeline(self, replica: int = 0) -> tuple[Stage, ...]:
        """Return the stages of one replica, first to last."""
        return self._pipelines.get(replica, ())

    @cached_property
    def _pipelines(self) -> dict[int, tuple[Stage, ...]]:
        found: dict[int, list[Stage]] = {}
        for stage in self.stages:
            found.setdefault(stage.replica, []).append(stage)
        return {replica: tuple(stages) for replica, stages in found.items()}

    @cached_property
    def ranks(self) -> tuple[RankAssignment, ...]:
        """The assignment of each rank that trains; the ranks of a cluster and of a stage are consecutive.

        In a stage tensor parallelism varies fastest: rank `cp * tp degree + tp`. With `compute: virtual` a stage is one
        rank, whatever its degrees.
        """
        stages = sorted(range(len(self.stages)), key=self._first_ranks.__getitem__)
        return tuple(
            RankAssignment(stage, at % self.stages[stage].tp, at // self.stages[stage].tp)
            for stage in stages
            for at in range(self._ranks_per_stage[stage])
        )

    @cached_property
    def rank_clusters(self) -> tuple[str, ...]:
        """The cluster of each rank that trains."""
        return tuple(self.stages[one.stage].cluster for one in self.ranks)

    @property
    def num_ranks(self) -> int:
        """Number of ranks, those that decode included."""
        return len(self.ranks) + len(self.rollouts)

    def is_rollout(self, rank: int) -> bool:
        """Return whether a rank decodes and takes no part in training."""
        return rank >= len(self.ranks)

    def stage_of(self, rank: int) -> Stage:
        """Return the stage of a rank; that of a rank that decodes is the whole model on its chips."""
        if self.is_rollout(rank):
            place = self.rollouts[rank - len(self.ranks)]
            layers = (0, self.num_layers)
            return Stage(cluster=place.cluster, node_group=place.node_group, layers=layers, tp=place.chips)
        return self.stages[self.ranks[rank].stage]

    def chips_of(self, rank: int) -> int:
        """Return the number of chips of a rank."""
        if self.is_rollout(rank):
            return self.rollouts[rank - len(self.ranks)].chips
        return self.stage_of(rank).num_chips // len(self.ranks_of(self.ranks[rank].stage))

    def ranks_of(self, stage: int) -> range:
        """Return the ranks of stage index `stage`, in tensor-parallel order for each share of the tokens."""
        first = self._first_ranks[stage]
        return range(first, first + self._ranks_per_stage[stage])

    def tp_ranks_of(self, stage: int, cp: int = 0) -> range:
        """Return the ranks of stage index `stage` that hold share `cp` of the tokens, in tensor-parallel order."""
        ranks, tp = self.ranks_of(stage), self.stages[stage].tp
        return ranks[cp * tp : (cp + 1) * tp]

    def cp_ranks_of(self, stage: int, tp: int = 0) -> range:
        """Return the ranks of stage index `stage` that hold shard `tp`, in the order of their shares of the tokens."""
        return self.ranks_of(stage)[tp :: self.stages[stage].tp]

    @cached_property
    def _first_ranks(self) -> tuple[int, ...]:
        if self.rank_order == "stage":
            return tuple(itertools.accumulate(self._ranks_per_stage[:-1], initial=0))
        return number_stages([(stage.cluster, stage.node_group) for stage in self.stages], self._ranks_per_stage)

    @cached_property
    def _ranks_per_stage(self) -> tuple[int, ...]:
        return tuple(1 if self.compute == "virtual" else stage.num_chips for stage in self.stages)

    @property
    def num_chunks(self) -> int | None:
        """Model chunks per stage of an interleaved schedule (default 2) or a searched one; None for other schedules."""
        if self.schedule == "searched":
            return self.chunks
        if self.schedule != "interleaved":
            return None
        if any(len(self.pipeline(replica)) == 1 for replica in range(self.dp)):
            return 1
        return self.chunks or min(2, *(stage.num_layers for stage in self.stages))

    @property
    def num_model_copies(self) -> int:
        """Copies of the model per replica: 2 for DualPipe, where micro-batches enter at both ends."""
        return 2 if self.schedule == "dualpipe" else 1

    def chunk_layers(self, replica: int = 0) -> tuple[tuple[LayerRange, ...], ...]:
        """Return the layer ranges of the model chunks of each stage.

        Interleaved, and searched with chunks: chunk 0 of all stages comes first in the model, then chunk 1, and so
        on; the chunk sizes of a stage add up to its layers and differ by at most one. DualPipe: a stage holds its own
        layers and those of its mirror stage, counted from the other end. Other schedules: one chunk per stage.
        """
        stages, chunks = self.pipeline(replica), self.num_chunks or 1
        if self.num_model_copies == 2:
            return tuple((a.layers, b.layers) for a, b in zip(stages, reversed(stages), strict=True))
        found: list[list[tuple[int, int]]] = [[] for _ in stages]
        end = 0
        for chunk in range(chunks):
            for pieces, stage in zip(found, stages, strict=True):
                first = end
                end += stage.num_layers * (chunk + 1) // chunks - stage.num_layers * chunk // chunks
                pieces.append((first, end))
        return tuple(map(tuple, found))

    @cached_property
    def replica_kinds(self) -> tuple[tuple[int, ...], ...]:
        """Replicas grouped by equal stages, micro-batch count and micro-batch size."""
        found: dict[tuple[object, ...], list[int]] = {}
        for replica in range(self.dp):
            stages = [one.model_dump_json(exclude={"replica"}) for one in self.pipeline(replica)]
            batches = self.micro_batches_of(replica), self.micro_batch_size_of(replica)
            found.setdefault((*batches, *stages), []).append(replica)
        return tuple(map(tuple, found.values()))

    @cached_property
    def _holders(self) -> Counter[tuple[int, str, str, LayerRange, int]]:
        """Replicas by (replica group, cluster, node group, layers, chips) of a stage; one group without local steps."""
        groups = self.replica_groups if self.local_steps > 1 else (0,) * self.dp
        return Counter(
            (groups[one.replica], one.cluster, one.node_group, one.layers, one.num_chips) for one in self.stages
        )

    def reducing_replicas(self, stage: Stage) -> dict[str, tuple[int, int]]:
        """Return the replicas that reduce gradients of a stage's layers in its cluster every step, itself included.

        Maps each node group, that of `stage` first, to (number of replicas, chips of the fewest for a stage). A
        replica that holds the layers in several node groups counts in each by its share of them, rounded up.
        """
        if self.dp == 1:
            return {stage.node_group: (1, stage.num_chips)}
        group = self.replica_groups[stage.replica] if self.local_steps > 1 else 0
        (first, last), shares, chips = stage.layers, {stage.node_group: 0.0}, {stage.node_group: stage.num_chips}
        for (own, cluster, name, layers, num_chips), count in self._holders.items():
            common = min(last, layers[1]) - max(first, layers[0])
            if common > 0 and own == group and cluster == stage.cluster:
                shares[name] = shares.get(name, 0.0) + count * common / (last - first)
                chips[name] = min(chips.get(name, num_chips), num_chips)
        return {name: (math.ceil(share - 1e-9), chips[name]) for name, share in shares.items()}

    def gradient_peer_clusters(self, stage: int) -> tuple[str, ...]:
        """Return the other clusters that reduce gradients of the same layers with `stage`, in stage order."""
        mine = self.stages[stage]
        return tuple(
            dict.fromkeys(
                one.cluster
                for one in self.stages
                if one.replica != mine.replica
                and one.cluster != mine.cluster
                and max(one.layers[0], mine.layers[0]) < min(one.layers[1], mine.layers[1])
            )
        )

    def hops(self, replica: int = 0) -> tuple[tuple[str, str], ...]:
        """Return the (source, target) clusters between consecutive stages of `replica`, in pipeline order."""
        stages = self.pipeline(replica)
        pairs = itertools.pairwise(stages)
        return tuple((a.cluster, b.cluster) for a, b in pairs if a.cluster != b.cluster)

    def all_hops(self) -> tuple[tuple[str, str], ...]:
        """Return the hops of all replicas in replica order, matching `Prediction.wan_gbps`."""
        return tuple(hop for replica in range(self.dp) for hop in self.hops(replica))

    def link_kbps(self, capacity_gbps: Mapping[PoolResource, float]) -> dict[PoolResource, int]:
        """Return the whole kbit/s that the plan sends over each link, at most what `capacity_gbps` says that it has.

        Counts both directions of every hop, and the gradients of replicas at several clusters. The coordinator
        allocates it, and the edge of a site shapes it.
        """
        gbps = self.predicted.wan_gbps if self.predicted else ()
        found: dict[PoolResource, int] = {}
        for (one, other), rate in zip(self.all_hops(), gbps, strict=False):
            for link in (PoolResource.link(one, other), PoolResource.link(other, one)):
                if link in capacity_gbps and rate:
                    found[link] = found.get(link, 0) + math.ceil(rate * KBPS_PER_GBPS)
        for text, rate in (self.predicted.gradient_gbps if self.predicted else {}).items():
            link = PoolResource.parse(text)
            if link in capacity_gbps and rate:
                found[link] = found.get(link, 0) + math.ceil(rate * KBPS_PER_GBPS)
        return {link: min(rate, math.floor(capacity_gbps[link] * KBPS_PER_GBPS)) for link, rate in found.items()}

    def parts(self) -> tuple[PlanPart, ...]:
        """Split the plan into parts, one per cluster."""
        return tuple(PlanPart.from_plan(self, cluster) for cluster in self.clusters)

    def reads_data(self, cluster: str) -> bool:
        """Return whether a first or last stage, which read tokens and labels, is at `cluster`."""
        return any(
            first == 0 or end == self.num_layers
            for replica in range(self.dp)
            for stage, chunks in zip(self.pipeline(replica), self.chunk_layers(replica), strict=True)
            if stage.cluster == cluster
            for first, end in chunks
        )


def with_stored_rank_order(plan: Plan) -> Plan:
    """Return a plan read from a log or table; earlier releases stored no `rank_order` and numbered by stage."""
    return plan if "rank_order" in plan.model_fields_set else plan.model_copy(update={"rank_order": "stage"})


def group_replicas_by_cluster(clusters: Sequence[Collection[str]]) -> tuple[int, ...]:
    """Return the group of each replica, given its clusters; replicas with a common cluster share a group.

    Groups are numbered from 0 in the order of their first replica.
    """
    group_of: dict[str, int] = {}
    for replica, names in enumerate(clusters):
        joined = {group_of[name] for name in names if name in group_of}
        least = min(joined, default=replica)
        group_of |= {name: least for name, group in group_of.items() if group in joined}
        group_of |= dict.fromkeys(names, least)
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(group_of[next(iter(names))], len(numbers)) for names in clusters)


class PlanPart(FrozenModel):
    """The part of a plan at one cluster. `ranks` index `Plan.ranks`; `chips` counts chips by node group."""

    cluster: Name
    ranks: tuple[NonNegativeInt, ...]
    chips: dict[Name, PositiveInt]

    @classmethod
    def from_plan(cls, plan: Plan, cluster: str) -> PlanPart:
        """Return the part of `plan` at `cluster`."""
        here = [place for place, stage in enumerate(plan.stages) if stage.cluster == cluster]
        chips: dict[str, int] = {}
        for stage in map(plan.stages.__getitem__, here):
            chips[stage.node_group] = chips.get(stage.node_group, 0) + stage.num_chips
        ranks = sorted(rank for place in here for rank in plan.ranks_of(place))
        for rank, decoder in enumerate(plan.rollouts, len(plan.ranks)):
            if decoder.cluster == cluster:
                chips[decoder.node_group] = chips.get(decoder.node_group, 0) + decoder.chips
                ranks.append(rank)
        return cls(cluster=cluster, ranks=tuple(ranks), chips=chips)


class Refusal(FrozenModel):
    """Why a combination of clusters gives no plan.

    `stage` is the co-scheduling filter that rejected it (None: the plan search). The remaining fields give
    the shortage: nodes or storage at the single cluster of `owner`, or bandwidth between two clusters.
    """

    clusters: tuple[Name, ...]
    reason: str
    stage: Literal["compute", "storage", "network"] | None = None
    owner: Name | None = None
    lacking_nodes: NonNegativeInt = 0
    lacking_bytes: NonNegativeInt = 0
    lacking_gbps: NonNegativeFloat = 0.0


SEARCH_ENDED_EARLY = "the search for plans was ended at its limit of CPU time"
"""Begins the refusal, and the assumption of plans, of a search that was ended before it had come to its end."""


class PlanSet(FrozenModel):
    """The planner's result: candidate plans, fastest first, and rejected cluster combinations."""

    plans: tuple[Plan, ...]
    refused: tuple[Refusal, ...] = ()
