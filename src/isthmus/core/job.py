"""`Job`: a training request, written as `job.yaml`; see `docs/formats.md`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from isthmus.core.base_model import (
    ComputeMode,
    Fraction,
    FrozenModel,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PathName,
    PositiveFloat,
    PositiveInt,
    TransportKind,
)
from isthmus.core.priority import Priority

TrainingTask = Literal["pretrain", "continue", "finetune"]


class DataConfig(FrozenModel):
    """Training text: folders, files or globs, local or any fsspec URL.

    `format` `auto` reads `.jsonl` as JSON Lines and everything else as text; `chat` is JSON Lines with a
    `messages` list. `tokenizer` is `bytes` or the path of a `tokenizer.json`.
    """

    paths: tuple[PathName, ...] = Field(min_length=1)
    format: Literal["auto", "text", "jsonl", "chat"] = "auto"
    text_field: str = "text"
    tokenizer: PathName = "bytes"
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.01
    max_bytes: PositiveInt | None = None


class TrainingConfig(FrozenModel):
    """Training hyper-parameters; a sample is one sequence of `sequence_length` tokens.

    `local_steps` above 1 also admits plans with local SGD between clusters (DiLoCo): replicas take that many
    steps before they average their parameters. This changes the training result and divides the traffic by
    `local_steps`. Plans that reduce gradients every step remain candidates.

    `optimizer_on_host` keeps fp32 weights and moments in host memory and updates them there. It saves
    12 bytes per parameter on the chip (8 in fp32), slows the end of each step and gives the same result.
    """

    steps: PositiveInt
    sequence_length: PositiveInt = 2048
    micro_batch_size: PositiveInt = 1
    global_batch_size: Annotated[PositiveInt, Field(le=10**6)] = 8
    local_steps: PositiveInt = 1
    learning_rate: PositiveFloat = 3e-4
    min_learning_rate: NonNegativeFloat = 0.0
    warmup_steps: NonNegativeInt = 0
    weight_decay: NonNegativeFloat = 0.1
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    epsilon: PositiveFloat = 1e-8
    clip_norm: NonNegativeFloat = 1.0
    precision: Literal["bf16", "fp32"] = "bf16"
    optimizer_on_host: bool = False
    seed: NonNegativeInt = 0
    evaluate_every: NonNegativeInt = 0
    evaluate_samples: PositiveInt = 16

    @model_validator(mode="after")
    def _check_batch_sizes(self) -> TrainingConfig:
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is not a multiple of "
                f"micro_batch_size {self.micro_batch_size}"
            )
        return self

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per step of one replica."""
        return self.global_batch_size // self.micro_batch_size


class CheckpointConfig(FrozenModel):
    """Where and how often checkpoints are written; `every_steps` 0 writes one at the end only.

    After every step each worker also keeps its state in memory and a copy on another machine of its cluster.
    A cluster with one machine copies to another cluster if `copies_across_clusters` is set.
    """

    folder: PathName
    every_steps: NonNegativeInt = 100
    keep: PositiveInt = 2
    copies_across_clusters: bool = False


class PlacementConstraints(FrozenModel):
    """Where the job may run. The switches are those of the report's Tables 3 to 19.

    `data_owners` and `data_regions` limit which clusters may read the training data: the first and last
    stage of every replica (tokens and labels) are placed there, other stages anywhere.
    `network: false` skips the check of free link bandwidth.
    """

    clusters: tuple[Name, ...] = ()
    owners: tuple[Name, ...] = ()
    chips: tuple[Name, ...] = ()
    regions: tuple[str, ...] = ()
    data_owners: tuple[Name, ...] = ()
    data_regions: tuple[str, ...] = ()
    max_chips: PositiveInt | None = None
    several_owners: bool = True
    mixed_chips: bool = True
    network: bool = True


class ParallelDegrees(FrozenModel):
    """Parallelism degrees fixed by the user; the planner chooses the others."""

    tp: PositiveInt | None = None
    pp: PositiveInt | None = None
    dp: PositiveInt | None = None
    cp: PositiveInt | None = None
    ep: PositiveInt | None = None


class Job(FrozenModel):
    """A training job: one model, one data set, one result.

    `output` receives the trained Hugging Face model. `policy` selects among the candidate plans: `manual`
    waits for the user, `auto` takes the predicted fastest. After a worker failure the job restarts from its
    last checkpoint, at most `max_restarts` times. A job of higher `priority` may, if its user agrees, preempt
    `preemptible` jobs of lower priority; these are checkpointed first and resume later. `deadline_s` counts
    from submission. `overlap: false` excludes schedules that overlap communication with computation.

    `transport` selects how messages between clusters are sent: by threads of the worker, or by a separate
    process (Linux only; each side makes one more copy through shared memory).

    `compute: virtual` runs the job without training: a stage waits for the predicted time instead of
    computing and sends tensors of real size. The job reads no data and writes no loss, checkpoint or model.
    If stopped, it restarts at the first step.
    """

    version: Literal[1] = 1
    name: Name
    model: PathName
    task: TrainingTask = "pretrain"
    data: DataConfig
    training: TrainingConfig
    checkpoints: CheckpointConfig
    output: PathName
    placement: PlacementConstraints = PlacementConstraints()
    parallel: ParallelDegrees = ParallelDegrees()
    overlap: bool = True
    compute: ComputeMode = "real"
    transport: TransportKind = "thread"
    priority: Priority = "middle"
    preemptible: bool = True
    deadline_s: PositiveFloat | None = None
    policy: Literal["auto", "manual"] = "manual"
    max_restarts: NonNegativeInt = 3
