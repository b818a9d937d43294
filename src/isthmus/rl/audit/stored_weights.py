"""`StoredWeights`: weights of past versions from the checkpoints of a run and the folder of its model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from isthmus.core.errors import IsthmusError, UnavailableError
from isthmus.core.job import Job
from isthmus.rl.rollout.open_engine import engine_dtype
from isthmus.rl.versions.weights_stream import PolicyVersion
from isthmus.train.checkpoint.checkpoint_folder import checkpoint_name, read_layout, read_manifest, read_manifests
from isthmus.train.checkpoint.layout.checkpoint_layout import CheckpointLayout
from isthmus.train.checkpoint.layout.shard_files import read_shards
from isthmus.train.checkpoint.layout.tensor_shard import TensorShard
from isthmus.train.model.load_weights import load_weights

_WEIGHT = "weight/"
_NUM_KEPT = 2
"""Versions in memory at a time, beside the engine's: a sample may have tokens of several."""
_READ_BYTES = 256 << 20
"""Tensors are read in groups of about this size."""


class StoredWeights:
    """Reads versions, each checked against the name that its run gave it.

    `names` are by version, which is the number of training steps before it; "" stands for one that cannot be told.
    """

    def __init__(self, job: Job, names: Mapping[int, str]) -> None:
        self._job, self._names, self._folder = job, names, Path(job.checkpoints.folder)
        self._kept: dict[int, Mapping[str, torch.Tensor]] = {}
        self._problems: dict[int, str] = {}

    def __call__(self, version: int) -> Mapping[str, torch.Tensor] | None:
        """Return the weights after `version` steps, None where `problem` has a cause."""
        if self.problem(version):
            return None
        self._kept[version] = self._kept.pop(version)  # the last one used is the last to go
        return self._kept[version]

    def problem(self, version: int) -> str:
        """Return why the weights of a version cannot be had, "" if they can."""
        if version not in self._kept and version not in self._problems:
            try:
                problem = self._read(version)
            except IsthmusError as error:
                problem = f"version {version} cannot be read: {error.message}"
            except OSError as error:
                problem = f"version {version} cannot be read: {error}"
            if problem:
                self._problems[version] = problem
        return self._problems.get(version, "")

    def _read(self, version: int) -> str:
        """Read a version, in place of the one that was used longest ago; return "" or why it cannot be had."""
        name = self._names.get(version)
        if name is None:
            return f"version {version} is not on disk: no checkpoint was written then"
        if not name:
            return f"version {version} was made twice, with other weights: which ones sampled is not known"
        for old in list(self._kept)[: 1 - _NUM_KEPT]:
            del self._kept[old]
        if (self._folder / checkpoint_name(version)).is_dir():
            tensors = dict(self._read_checkpoint(version))
        elif version == 0:
            tensors = self._read_model()
        else:
            return f"version {version} is not on disk: {self._folder} keeps {self._known()}"
        if PolicyVersion(version, tensors).version.digest != name:
            return f"version {version} on disk has other weights than the one that sampled"
        self._kept[version] = tensors
        return ""

    def _read_checkpoint(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights of a checkpoint, group by group, as the engines compute with them."""
        place = self._folder / checkpoint_name(version)
        layout = read_layout(place, read_manifest(place))
        for names in _groups(_shapes(layout)):
            tensors = {name: torch.empty(shape) for name, shape in names.items()}
            read_shards(place, layout, [TensorShard.full(_WEIGHT + name, one) for name, one in tensors.items()])
            for name, tensor in tensors.items():
                yield name, tensor.to(engine_dtype(self._job))

    def _read_model(self) -> dict[str, torch.Tensor]:
        """Return the weights that the job began with; a checkpoint tells their names and shapes."""
        manifest = next(read_manifests(self._folder), None)
        if manifest is None:
            hint = "run this where checkpoints.folder is"
            raise UnavailableError(f"{self._folder} has no checkpoint, which tells the model's shapes", hint=hint)
        layout = read_layout(self._folder / checkpoint_name(manifest.step), manifest)
        dtype = engine_dtype(self._job)
        tensors = {name: torch.empty(shape, dtype=dtype) for name, shape in _shapes(layout).items()}
        load_weights(tensors.items(), self._job.model)
        return tensors

    def _known(self) -> str:
        return ", ".join(str(one.step) for one in read_manifests(self._folder)) or "none"


def _shapes(layout: CheckpointLayout) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights by full-model name."""
    return {one.name.removeprefix(_WEIGHT): tuple(one.shape) for one in layout.shards if one.name.startswith(_WEIGHT)}


def _groups(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield tensors in groups that are read at once."""
    group, size = dict[str, tuple[int, ...]](), 0
    for name, shape in shapes.items():
        group[name] = shape
        size += 4 * torch.Size(shape).numel()
        if size >= _READ_BYTES:
            yield group
            group, size = {}, 0
    if group:
        yield group
