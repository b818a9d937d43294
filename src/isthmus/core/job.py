"""`Job`: a training request, written as `job.yaml`; see `docs/formats.md`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, GetCoreSchemaHandler, field_validator, model_validator
from pydantic_core import CoreSchema, core_schema

from isthmus.core.base_model import (
    AttentionKernelName,
    ComputeMode,
    Fraction,
    FrozenModel,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PathName,
    PositiveFloat,
    PositiveInt,
    TrainingPrecision,
    TransportKind,
)
from isthmus.core.job_parts.command_job import NO_FILE, CommandConfig
from isthmus.core.job_parts.rl_job import RlConfig
from isthmus.core.job_parts.runtime_choice import RuntimeChoice
from isthmus.core.priority import Priority
from isthmus.core.rights.storage_rules import Access
from isthmus.core.stack import StackChoice
from isthmus.core.units import Price

TrainingTask = Literal["pretrain", "continue", "finetune", "rl"]

JOB_PLACEHOLDER = "{job}"
"""Stands for the job's id in `checkpoints.folder` and `output`."""


MAX_DIFFERENCES = 512
"""Largest number of differences between a job and the run that it resumes."""


MAX_ROLLOUT_CLUSTERS = 256
"""Most clusters that decode for a job."""

MAX_READERS = 64
"""Largest number of other users that may resume from a job."""

BYTES_TOKENIZER = "bytes"
"""One token per UTF-8 byte."""
MODEL_TOKENIZER = "model"
"""The tokenizer in the folder of the model."""
PLAIN_TEMPLATE = "plain"
"""The built-in chat template."""
MAX_TEMPLATE_CHARS = 1 << 18
"""Largest chat template."""


class DataConfig(FrozenModel):
    """Training text: folders, files or globs, local or any fsspec URL.

    `format` `auto` reads `.jsonl` as JSON Lines and everything else as text; `chat` is JSON Lines with a
    `messages` list. `prompts`, the format of task `rl`, is JSON Lines with a `prompt` and an `answer`.

    `tokenizer` is `model` (the one in the model's folder), `bytes` (one token per byte), or the path of a
    `tokenizer.json` or its folder. `submit` replaces `model` by the path that it finds, or by `bytes` if there is
    none, and says so.

    `chat_template` renders the conversations of task `finetune`: a Jinja template, the path of one, or `plain` for
    a built-in one. Without it the template of the tokenizer is used; without either the job is refused.
    """

    paths: tuple[PathName, ...] = Field(min_length=1)
    format: Literal["auto", "text", "jsonl", "chat", "prompts"] = "auto"
    text_field: str = "text"
    tokenizer: PathName = MODEL_TOKENIZER
    chat_template: Annotated[str, Field(min_length=1, max_length=MAX_TEMPLATE_CHARS)] | None = None
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.01
    max_bytes: PositiveInt | None = None

    @property
    def tokenizer_path(self) -> str | None:
        """The path of the tokenizer; None if `tokenizer` is a keyword."""
        return None if self.tokenizer in (BYTES_TOKENIZER, MODEL_TOKENIZER) else self.tokenizer


def is_template_text(value: str) -> bool:
    """Return whether a `chat_template` is a Jinja template, not the path of one."""
    return "{{" in value or "{%" in value


class TrainingConfig(FrozenModel):
    """Training hyper-parameters; a sample is one sequence of `sequence_length` tokens.

    `local_steps` above 1 also admits plans with local SGD between clusters (DiLoCo): replicas take that many
    steps before they average their parameters. This changes the training result and divides the traffic by
    `local_steps`. Plans that reduce gradients every step remain candidates. The average is a step of
    `outer_learning_rate` along the mean change of the parameters, with Nesterov momentum `outer_momentum`; 1 and 0
    are a plain average.

    `precision: fp16` scales the loss by a power of two, which an overflow halves, at all ranks alike; the step of an
    overflow updates nothing. With `precision: fp8` weights are bf16, and decoder layers multiply 8-bit numbers in
    blocks with a scale each; a chip without kernels for that computes the same products in bf16. A stage of a plan may
    compute in another precision.

    `attention` is the kernel of the attention core: `sdpa` leaves the choice to torch, `flash` is its flash kernel
    alone, `flex` the compiled flex attention of CUDA devices, `eager` keeps the scores in memory. `compile` compiles
    each decoder layer by torch.compile and keeps the graphs in the worker's folder. `deterministic: false` permits
    kernels of a device whose results differ from run to run, and a backward pass in threads of its own: a resumed run
    then no longer repeats every bit. A CPU computes deterministically in any case.

    `optimizer_on_host` keeps fp32 weights and moments in host memory and updates them there. It saves
    12 bytes per parameter on the chip (8 in fp32), slows the end of each step and gives the same result.
    """

    steps: PositiveInt
    sequence_length: PositiveInt = 2048
    micro_batch_size: PositiveInt = 1
    global_batch_size: Annotated[PositiveInt, Field(le=10**6)] = 8
    local_steps: PositiveInt = 1
    outer_learning_rate: PositiveFloat = 0.7
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    learning_rate: PositiveFloat = 3e-4
    min_learning_rate: NonNegativeFloat = 0.0
    warmup_steps: NonNegativeInt = 0
    weight_decay: NonNegativeFloat = 0.1
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    epsilon: PositiveFloat = 1e-8
    clip_norm: NonNegativeFloat = 1.0
    precision: TrainingPrecision = "bf16"
    attention: AttentionKernelName = "sdpa"
    compile: bool = False
    deterministic: bool = True
    optimizer_on_host: bool = False
    seed: NonNegativeInt = 0
    evaluate_every: NonNegativeInt = 0
    evaluate_samples: PositiveInt = 16

    @model_validator(mode="after")
    def _check_batch_sizes(self) -> TrainingConfig:
        batch, micro = self.global_batch_size, self.micro_batch_size
        if batch % micro:
            nearest = next(one for one in range(min(micro, batch), 0, -1) if batch % one == 0)
            raise ValueError(
                f"global_batch_size {batch} is not a multiple of micro_batch_size {micro}; "
                f"nearest valid micro_batch_size: {nearest}"
            )
        return self

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per step of one replica."""
        return self.global_batch_size // self.micro_batch_size


OBJECT_STORES = ("s3", "gs", "gcs", "abfs", "az", "oss", "file")
"""Kinds of `checkpoints.copy_store`: the schemes of fsspec that write objects. `file` is a mounted store."""
MAX_URL_CHARS = 1024

MAX_COPIES = 8
"""Most copies of each part of a checkpoint at other sites."""


class CheckpointConfig(FrozenModel):
    """Where and how often checkpoints are written; `every_steps` 0 writes one at the end only.

    A folder belongs to one job: another job is refused there. `{job}` in `folder` stands for the job's id, so
    the default is a folder of the job's own beside the job file.

    Sites that share no folder keep their own parts there, and `copies` of each part at other sites. The object store
    `copy_store`, a URL, also gets a copy of each part, encrypted with a key of the job: its owner can neither read nor
    change it. The credentials are those of the workers at each site, never a part of the URL.

    Every `memory_interval` steps, and with each checkpoint, each worker also keeps its state in memory and a copy on
    another machine of its cluster: a loss then costs at most these steps. With `auto` training waits for it in 1 % of
    its time at most. Ranks of a cluster that hold the same share the work. A cluster with one machine copies to another
    cluster if `copies_across_clusters` is set.
    """

    folder: PathName = f"checkpoints/{JOB_PLACEHOLDER}"
    every_steps: NonNegativeInt = 100
    keep: PositiveInt = 2
    copies: Annotated[int, Field(ge=0, le=MAX_COPIES)] = 1
    copy_store: Annotated[str, Field(pattern=r"^[a-z0-9]+://[^@:?#%]+$", max_length=MAX_URL_CHARS)] | None = None
    copies_across_clusters: bool = False
    memory_interval: Literal["auto"] | PositiveInt = 1

    @field_validator("copy_store")
    @classmethod
    def _check_copy_store(cls, url: str | None) -> str | None:
        if url is None:
            return None
        scheme, _, rest = url.partition("://")
        if scheme not in OBJECT_STORES:
            near = difflib.get_close_matches(scheme, OBJECT_STORES, 1, 0) or OBJECT_STORES
            raise ValueError(f"'{scheme}' is no object store; nearest: {near[0]}; one of {', '.join(OBJECT_STORES)}")
        if any(part in ("", ".", "..") for part in rest.lstrip("/").rstrip("/").split("/")):
            raise ValueError(f"{url} has an empty, '.' or '..' part; name the bucket and a folder in it")
        return url


class ResumeSource(FrozenModel):
    """The run that a job resumes: the folder of its checkpoints, its id if known, and the differences to this job.

    The server makes it from `resume: JOB`, the command line from `resume: FOLDER`.
    """

    folder: PathName
    job: Name | None = None
    differences: Annotated[tuple[str, ...], Field(max_length=MAX_DIFFERENCES)] = ()


class PlacementConstraints(FrozenModel):
    """Where the job may run. The switches are those of the report's Tables 3 to 19.

    `data_owners` and `data_regions` limit which clusters may read the training data: the first and last
    stage of every replica (tokens and labels) are placed there, other stages anywhere.
    `network: false` skips the check of free link bandwidth.

    `train` are the clusters that train a job of task `rl`; without it `clusters` are. At each cluster of `rollouts` a
    chip decodes for it; with `train` alone, the chip of rank 0 decodes and trains in turns; with neither the planner
    chooses who trains and who decodes. `least_rollouts` of them start with the training, and a running job needs them.
    Others that have no free chip join later; those that are lost, drained, or taken by their owner or a job of higher
    priority leave, and may join again.
    """

    clusters: tuple[Name, ...] = ()
    train: tuple[Name, ...] = ()
    rollouts: Annotated[tuple[Name, ...], Field(max_length=MAX_ROLLOUT_CLUSTERS)] = ()
    least_rollouts: PositiveInt = 1
    owners: tuple[Name, ...] = ()
    chips: tuple[Name, ...] = ()
    regions: tuple[str, ...] = ()
    data_owners: tuple[Name, ...] = ()
    data_regions: tuple[str, ...] = ()
    max_chips: PositiveInt | None = None
    several_owners: bool = True
    mixed_chips: bool = True
    network: bool = True

    def admits(self, cluster: str, owner: str, region: str) -> bool:
        """Return whether the job may run on a cluster of this name, owner and region."""
        return (
            (not self.clusters or cluster in self.clusters)
            and (not self.train or cluster in self.train)
            and (not self.owners or owner in self.owners)
            and (not self.regions or region in self.regions)
        )

    def may_read_data(self, owner: str, region: str) -> bool:
        """Return whether a cluster of this owner and region may read the training data."""
        return (not self.data_owners or owner in self.data_owners) and (
            not self.data_regions or region in self.data_regions
        )


class ParallelDegrees(FrozenModel):
    """Parallelism degrees fixed by the user; the planner chooses the others."""

    tp: PositiveInt | None = None
    pp: PositiveInt | None = None
    dp: PositiveInt | None = None
    cp: PositiveInt | None = None
    ep: PositiveInt | None = None


_UNUSED_BY_COMMANDS: dict[str, Any] = {
    "model": NO_FILE,
    "data": {"paths": (NO_FILE,), "tokenizer": BYTES_TOKENIZER},
    "training": {"sequence_length": 1, "global_batch_size": 1},
    "output": f"runs/{JOB_PLACEHOLDER}",
    "preemptible": False,
}
"""Required fields of a job, as one with `engine: command` has them unless it names an output."""
_NO_STEPS = 10**9
"""Steps of a program that does not say how many it reports."""


class Job(FrozenModel):
    """A training job: one model, one data set, one result; or, with `engine: command`, any program.

    `model` is a folder, a `config.json`, or the name of a model of the Hugging Face Hub: `ORG/NAME`, or
    `ORG/NAME@REVISION`. `submit` replaces a name by the folder in this machine's cache, and notes the commit in
    `model_source`.

    `output` receives the trained Hugging Face model; a folder with other content is refused. Where the sites share no
    folder, that is the one at `output_site`, which takes part in every plan, else at the site of the first stage. In
    `output` and
    `checkpoints.folder`, `{job}` stands for the job's id. `resume` continues from the newest checkpoint of
    another job (its id) or of a folder (a path with `/`), which stays unchanged. Another user's job needs a grant: it
    names the user in its `readers`, or the owner of the site grants it.

    `policy` selects among the candidate plans: `manual` waits for the user, `auto` takes the predicted
    fastest. After a worker failure the job restarts from its last checkpoint, at most `max_restarts` times. A job
    of higher `priority` may, if its user agrees, preempt `preemptible` jobs of lower priority; these are
    checkpointed first and resume later. `deadline_s` counts from submission. `overlap: false` excludes schedules
    that overlap communication with computation.

    `project` is the project whose quotas the job counts to (`isthmus quota show`); without it the only one of its
    user, if there is one. `max_price` is the most that the job may cost in the pool's currency: a plan that would
    cost more is refused, and a running job that has cost as much is saved and waits.

    `stack` is the training framework for which `isthmus plan` counts memory and time: a built-in one, a whole one, or
    the path of one (`*.yaml`). A pool's workers run `isthmus` only.

    `transport` selects how messages between clusters are sent: by threads of the worker, or by a separate
    process (Linux only; each side makes one more copy through shared memory).

    `compute: virtual` runs the job without training: a stage waits for the predicted time instead of
    computing and sends tensors of real size. The job reads no data and writes no loss, checkpoint or model.
    If stopped, it restarts at the first step.

    `engine: command` runs the program of `command` instead, with `RANK`, `WORLD_SIZE`, `LOCAL_RANK`,
    `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` in its environment. It names no model, data and training;
    `output` is the folder in which the program runs, by default `runs/{job}`. Other pool jobs do not preempt it, since
    it has no checkpoint that Isthmus could verify.
    `runtime` says which image, code and communication library the parts run with at sites that have images.

    Task `rl` trains the model on its own responses to prompts, by `rl`; `training.global_batch_size` counts samples.
    """

    version: Literal[1] = 1
    name: Name
    engine: Literal["isthmus", "command"] = "isthmus"
    command: CommandConfig | None = None
    model: PathName
    model_source: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+@[\w./-]+$", max_length=400)] | None = None
    task: TrainingTask = "pretrain"
    data: DataConfig
    training: TrainingConfig
    rl: RlConfig | None = None
    checkpoints: CheckpointConfig = CheckpointConfig()
    output: PathName
    output_site: Name | None = None
    resume: PathName | ResumeSource | None = None
    readers: Annotated[tuple[Name, ...], Field(max_length=MAX_READERS)] = ()
    placement: PlacementConstraints = PlacementConstraints()
    parallel: ParallelDegrees = ParallelDegrees()
    overlap: bool = True
    stack: StackChoice = "isthmus"
    compute: ComputeMode = "real"
    transport: TransportKind = "thread"
    runtime: RuntimeChoice = RuntimeChoice()
    priority: Priority = "middle"
    preemptible: bool = True
    deadline_s: PositiveFloat | None = None
    policy: Literal["auto", "manual"] = "manual"
    project: Name | None = None
    max_price: Price | None = None
    max_restarts: NonNegativeInt = 3

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema: fields that a command does not use are filled in what users write, which is plain data.

        JSON comes from `model_dump_json` and has them; to fill them there would double the time to parse it.
        """
        fields = handler(source)
        filled = core_schema.no_info_before_validator_function(cls._fill_unused_fields, fields)
        return core_schema.json_or_python_schema(json_schema=fields, python_schema=filled)

    @classmethod
    def _fill_unused_fields(cls, data: Any) -> Any:
        """Fill the required fields that a command does not use."""
        if not isinstance(data, dict) or data.get("engine") != "command":
            return data
        command = data.get("command")
        steps = command.get("steps") if isinstance(command, dict) else getattr(command, "steps", None)
        training = {**_UNUSED_BY_COMMANDS["training"], "steps": steps if isinstance(steps, int) else _NO_STEPS}
        return {**_UNUSED_BY_COMMANDS, "training": training, **data}

    @model_validator(mode="after")
    def _check_engine(self) -> Job:
        if (self.engine == "command") != (self.command is not None):
            raise ValueError("engine: command and the field `command` belong together; give both or neither")
        if self.command is None:
            return self
        used = {
            "model": self.model != NO_FILE,
            "data": self.data.paths != (NO_FILE,),
            "training": self.training.sequence_length != 1 or self.training.global_batch_size != 1,
            "resume": self.resume is not None,
            "parallel": self.parallel != ParallelDegrees(),
            "placement": self.placement != PlacementConstraints(),
            "compute": self.compute != "real",
            "preemptible": self.preemptible,
            "runtime": self.runtime != RuntimeChoice(),
            "rl": self.rl is not None,
            "checkpoints.copy_store": self.checkpoints.copy_store is not None,
        }
        if wrong := [name for name, given in used.items() if given]:
            raise ValueError(f"engine: command does not use {', '.join(wrong)}; leave them out (see `command`)")
        return self

    @model_validator(mode="after")
    def _check_rl(self) -> Job:
        if self.engine == "isthmus" and (self.task == "rl") != (self.rl is not None):
            raise ValueError("task: rl and the field `rl` belong together; give both or neither")
        return self

    @property
    def trains(self) -> bool:
        """Whether Isthmus trains a model for the job: it reads data and writes checkpoints and a result."""
        return self.engine == "isthmus" and self.compute == "real"

    @property
    def resume_folder(self) -> str | None:
        """Folder of the checkpoints to resume from; None without `resume`, or while it names a job."""
        if isinstance(self.resume, ResumeSource):
            return self.resume.folder
        return self.resume if self.resume is not None and is_folder(self.resume) else None


def is_folder(word: str) -> bool:
    """Return whether `word`, from `resume`, is a folder; any other word is a job."""
    return "/" in word or word in (".", "..", "~")


def with_own_folders(job: Job, job_id: str) -> Job:
    """Return `job` with `{job}` in its folders replaced by its id."""
    folder, output = job.checkpoints.folder, job.output
    if JOB_PLACEHOLDER not in folder + output:
        return job
    own = job.checkpoints.model_copy(update={"folder": folder.replace(JOB_PLACEHOLDER, job_id)})
    return job.model_copy(update={"checkpoints": own, "output": output.replace(JOB_PLACEHOLDER, job_id)})


def job_accesses(job: Job) -> Iterator[tuple[str, str, Access]]:
    """Yield field, path and access (`read` or `write`) of everything that a job names, URLs included."""
    if job.engine == "command":
        yield "output", job.output, "write"
        return
    yield "checkpoints.folder", job.checkpoints.folder, "write"
    yield "output", job.output, "write"
    if job.checkpoints.copy_store is not None:
        yield "checkpoints.copy_store", job.checkpoints.copy_store, "write"
    yield "model", job.model, "read"
    yield from (("data.paths", path, "read") for path in job.data.paths)
    if job.data.tokenizer_path is not None:
        yield "data.tokenizer", job.data.tokenizer_path, "read"
    if job.resume_folder is not None:
        yield "resume", job.resume_folder, "read"
    if job.runtime.code is not None:
        yield "runtime.code", job.runtime.code, "read"
    if job.rl is not None:
        yield from (("rl.function", path, "read") for path in job.rl.function_files)


def with_paths(job: Job, change: Callable[[str, str], str]) -> Job:
    """Return `job` with each path that `job_accesses` yields replaced by `change(field, path)`."""
    if job.engine == "command":
        return job.model_copy(update={"output": change("output", job.output)})
    data: dict[str, object] = {"paths": tuple(change("data.paths", path) for path in job.data.paths)}
    if job.data.tokenizer_path is not None:
        data["tokenizer"] = change("data.tokenizer", job.data.tokenizer_path)
    resume: str | ResumeSource | None = job.resume
    if isinstance(resume, ResumeSource):
        resume = resume.model_copy(update={"folder": change("resume", resume.folder)})
    elif resume is not None and is_folder(resume):
        resume = change("resume", resume)
    places, runtime = {"folder": change("checkpoints.folder", job.checkpoints.folder)}, job.runtime
    if job.checkpoints.copy_store is not None:
        places["copy_store"] = change("checkpoints.copy_store", job.checkpoints.copy_store)
    if runtime.code is not None:
        runtime = runtime.model_copy(update={"code": change("runtime.code", runtime.code)})
    rl = job.rl
    if rl is not None:
        rl = rl.with_function_files(tuple(change("rl.function", path) for path in rl.function_files))
    return job.model_copy(
        update={
            "runtime": runtime,
            "rl": rl,
            "checkpoints": job.checkpoints.model_copy(update=places),
            "output": change("output", job.output),
            "model": change("model", job.model),
            "data": job.data.model_copy(update=data),
            "resume": resume,
        }
    )
