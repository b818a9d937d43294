"""A pipeline whose stages are shared by several threads each: as `tests.train.threads`, with tensors cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from isthmus.comm.group.isthmus_group import IsthmusGroup
from isthmus.comm.transport.memory_transport import memory_transports
from isthmus.core.job import TrainingConfig
from isthmus.train.model.gather_full_parameters import gather_full_parameters
from isthmus.train.model.model_chunks import ModelChunks
from isthmus.train.model.stage_model import build_stage
from isthmus.train.pipeline.stage_executor import StageExecutor
from isthmus.train.tensor_parallel.tensor_parallel_group import TensorParallelGroup
from isthmus.train.tensor_parallel.tp_communicator import TpCommunicator
from tests.train.tensor_groups import each, tensor_groups
from tests.train.threads import Pipeline, Stage, meet


class SharedPipeline(Pipeline):
    """Pieces that end at the layers `ends`; stage `s` is shared by `tps[s]` ranks of cluster `s`.

    With `sp` they also share the tokens between blocks.
    """

    def __init__(
        self,
        model: Path,
        ends: Sequence[int],
        tps: Sequence[int],
        training: TrainingConfig,
        *,
        sp: bool = False,
        device: str = "cpu",
        **options: object,
    ) -> None:
        self.training, self.size, self.chunks = training, len(tps), len(ends) // len(tps)
        shares = [(stage, group) for stage, tp in enumerate(tps) for group in tensor_groups(tp, cuts_sequence=sp)]
        clusters = "".join("abcdef"[stage] for stage, _ in shares)
        self.groups = [IsthmusGroup(one, list(clusters)) for one in memory_transports(len(shares))]
        layers = list(zip([0, *ends], ends, strict=False))
        models = [_pieces(model, layers[stage :: self.size], training, group, device) for stage, group in shares]
        heads = [sum(tps[:stage]) for stage in range(len(tps))]
        self.stages = []
        for (stage, group), one, (exchange, optimizer) in zip(
            shares, models, meet(models, self.groups, clusters, training), strict=True
        ):
            dtype = torch.bfloat16 if training.precision == "bf16" else torch.float32
            shared = TpCommunicator(exchange, group)
            executor = StageExecutor(one, stage, heads, shared, dtype=dtype, **options)
            self.stages.append(Stage(one, executor, optimizer))

    def wholes(self) -> dict[str, torch.Tensor]:
        """Return the weights put together; of a tied embedding the last stage's copy."""
        by_group: dict[int, list[Stage]] = {}
        for stage in self.stages:
            by_group.setdefault(stage.executor.stage, []).append(stage)
        found: dict[str, torch.Tensor] = {}
        for stages in by_group.values():
            of = {stage.model.group: stage for stage in stages}
            parts = each(list(of), lambda group: dict(gather_full_parameters(of[group].model)))  # noqa: B023
            found |= {name: one.clone() for name, one in parts[0].items()}
        return found


def _pieces(
    model: Path,
    layers: Sequence[tuple[int, int]],
    training: TrainingConfig,
    group: TensorParallelGroup,
    device: str,
) -> ModelChunks:
    return ModelChunks(
        [
            build_stage(
                model,
                one,
                dtype=torch.float32,
                device=device,
                seed=training.seed,
                weights="random",
                group=group,
            )
            for one in layers
        ]
    )
