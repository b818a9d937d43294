"""`Job`: what the user asks for. `job.yaml` is its file form; see `docs/formats.md`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from isthmus.core.base import (
    Compute,
    Count,
    Fraction,
    Frozen,
    Index,
    Name,
    NotNegative,
    PathName,
    Positive,
    TransportKind,
)
from isthmus.core.priority import Priority

Task = Literal["pretrain", "continue", "finetune"]


class Data(Frozen):
    """Training text: folders, files or globs, local or any fsspec URL.

    `format` `auto` takes `.jsonl` as JSON Lines and everything else as text; `chat` is JSON Lines with a
    `messages` list. `tokenizer` is `bytes` or the path of a `tokenizer.json`.
    """

    paths: tuple[PathName, ...] = Field(min_length=1)
    format: Literal["auto", "text", "jsonl", "chat"] = "auto"
    text_field: str = "text"
    tokenizer: PathName = "bytes"
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.01
    max_bytes: Count | None = None


class Training(Frozen):
    """Hyper-parameters of the optimisation; a sample is one sequence of `sequence_length` tokens.

    `local_steps` above 1 admits plans whose replicas in clusters far apart take so many steps each on its
    own between two averages of their parameters (DiLoCo). That changes what is learned, for as many times
    less traffic between them; plans that reduce gradients every step stay candidates beside them.

    `optimizer_on_host` keeps fp32 weights and moments in the memory of the chips' hosts and updates them
    there: 12 bytes a parameter less on the chip (8 in fp32) for a slower end of each step, the same result.
    """

    steps: Count
    sequence_length: Count = 2048
    micro_batch_size: Count = 1
    global_batch_size: Annotated[Count, Field(le=10**6)] = 8
    local_steps: Count = 1
    learning_rate: Positive = 3e-4
    min_learning_rate: NotNegative = 0.0
    warmup_steps: Index = 0
    weight_decay: NotNegative = 0.1
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    epsilon: Positive = 1e-8
    clip_norm: NotNegative = 1.0
    precision: Literal["bf16", "fp32"] = "bf16"
    optimizer_on_host: bool = False
    seed: Index = 0
    evaluate_every: Index = 0
    evaluate_samples: Count = 16

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> Training:
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is not a multiple of "
                f"micro_batch_size {self.micro_batch_size}"
            )
        return self

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches in one step of one replica."""
        return self.global_batch_size // self.micro_batch_size


class Checkpoints(Frozen):
    """Where and how often the state of training is written; `every_steps` 0 means only at the end.

    Besides, after every step each worker keeps its state in memory, and a copy in that of another machine of
    its cluster; where the cluster has no other, and with `copies_across_clusters`, of another cluster.
    """

    folder: PathName
    every_steps: Index = 100
    keep: Count = 2
    copies_across_clusters: bool = False


class Placement(Frozen):
    """Where the job may run. The switches are those of the report's Tables 3 to 19.

    `data_owners` and `data_regions` say whose clusters, and where, may read the training data: the first and
    the last stage of every replica (tokens and labels) are placed there, the stages between anywhere.
    Without `network` plans are offered whatever the links between their clusters have left.
    """

    clusters: tuple[Name, ...] = ()
    owners: tuple[Name, ...] = ()
    chips: tuple[Name, ...] = ()
    regions: tuple[str, ...] = ()
    data_owners: tuple[Name, ...] = ()
    data_regions: tuple[str, ...] = ()
    max_chips: Count | None = None
    several_owners: bool = True
    mixed_chips: bool = True
    network: bool = True


class Parallel(Frozen):
    """Degrees that the user fixes; those left out are the planner's to choose."""

    tp: Count | None = None
    pp: Count | None = None
    dp: Count | None = None
    cp: Count | None = None
    ep: Count | None = None


class Job(Frozen):
    """A training job: one model, one data set, one result.

    `output` is the folder that becomes a Hugging Face model. `policy` says who chooses among the
    candidate plans: `manual` waits for the user, `auto` takes the one predicted fastest. A job that lost a
    worker is started again from its last checkpoint, at most `max_restarts` times. A job of higher
    `priority` may, if its user agrees, take the chips of `preemptible` ones of lower priority, which go on
    later from a checkpoint taken before. `deadline_s` counts from the submission. Without `overlap` no
    schedule is used that overlaps communication with computation.

    `transport` says what carries messages between clusters: threads of each worker, or a process beside it
    (Linux; the messages' bytes are copied once more at either end, by memory that the two share).

    `compute: virtual` rehearses the job: a stage waits for the plan's predicted time instead of computing,
    and sends tensors of the model's real size. Nothing is learned: no data is read, and there is no loss, no
    checkpoint and no result. A rehearsal that was stopped begins again at its first step.
    """

    version: Literal[1] = 1
    name: Name
    model: PathName
    task: Task = "pretrain"
    data: Data
    training: Training
    checkpoints: Checkpoints
    output: PathName
    placement: Placement = Placement()
    parallel: Parallel = Parallel()
    overlap: bool = True
    compute: Compute = "real"
    transport: TransportKind = "thread"
    priority: Priority = "middle"
    preemptible: bool = True
    deadline_s: Positive | None = None
    policy: Literal["auto", "manual"] = "manual"
    max_restarts: Index = 3
