"""Rules of a shared expert: it is computed while rows are under way, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from isthmus.train.expert_parallel.expert_parallel_group import ExpertParallelGroup
from isthmus.train.expert_parallel.shared_expert import overlap_shared_expert
from isthmus.train.expert_parallel.token_exchange import exchange_tokens
from isthmus.train.model.transformers_model import build_meta_model, choose_expert_kernels
from tests.train.small_models import write_config


class _Mirror(ExpertParallelGroup):
    """A group of two of which the other rank does what this one does; it writes what happens into `log`."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(0, (0, 1))
        self.log = log

    def exchange_counts(self, counts: torch.Tensor) -> torch.Tensor:
        return counts

    def start(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> Any:
        self.log.append("start")
        return _Arrives(rows.detach().clone(), self.log)


class _Arrives:
    def __init__(self, rows: torch.Tensor, log: list[str]) -> None:
        self._rows, self._log = rows, log

    def wait(self) -> torch.Tensor:
        self._log.append("end")
        return self._rows


def test_a_shared_expert_is_computed_between_start_and_end_of_both_ways(tmp_path: Path) -> None:
    """Gate and up on the way, down on the way back; their gradients while those of the rows are under way."""
    model = build_meta_model(write_config(tmp_path, "qwen2-moe"))
    choose_expert_kernels(model.config, "cpu")
    block: Any = model.model.layers[1].mlp.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    for name in ("gate_up_proj", "down_proj"):
        setattr(block.experts, name, torch.nn.Parameter(getattr(block.experts, name)[:2].detach().clone()))
    log: list[str] = []
    exchange = exchange_tokens(block.experts, _Mirror(log))
    overlap_shared_expert(block, exchange, lambda x: x, lambda x: x)
    for name in ("gate_proj", "up_proj", "down_proj"):
        part = getattr(block.shared_expert, name)
        part.register_forward_hook(lambda *_, name=name: log.append(name))
        part.register_full_backward_hook(lambda *_, name=name: log.append(name))
    hidden = torch.randn(2, 5, model.config.hidden_size, requires_grad=True)
    output = block(hidden)
    assert log == ["start", "gate_proj", "up_proj", "end", "start", "down_proj", "end"]
    log.clear()
    output.square().sum().backward()
    assert log[:3] == ["start", "down_proj", "end"]
    assert log[3] == "start"
    assert log[-1] == "end"
    assert sorted(log[4:-1]) == ["gate_proj", "up_proj"]
    assert hidden.grad is not None
