"""`ReduceOperation`: the reductions of torch.distributed as elementwise operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from isthmus.comm.group.run_program import Combine
from isthmus.core.errors import PlanError


@dataclass(frozen=True)
class ReduceOperation:
    """An elementwise operation; `is_average` divides by the number of ranks.

    `vendors_op` is its counterpart in the libraries of vendors.
    """

    name: str
    combine: Combine
    vendors_op: Any = None
    is_average: bool = False

    @property
    def adds(self) -> bool:
        """Whether this is a sum or an average."""
        return self.combine is torch.add

    @staticmethod
    def of(op: Any) -> ReduceOperation:
        """Return that of a `dist.ReduceOp`; raises `PlanError` for PREMUL_SUM, which only NCCL has."""
        for known, operation in _OPERATIONS.items():
            if op == known:
                return operation
        raise PlanError(f"the isthmus process group cannot reduce by {op}", hint="multiply before, and use SUM")

    @staticmethod
    def maximum() -> ReduceOperation:
        """Return the elementwise maximum."""
        return _OPERATIONS[dist.ReduceOp.MAX]

    def finish(self, total: torch.Tensor, size: int) -> None:
        """Divide `total` [N], of `size` ranks, in place if this is an average; integers are truncated."""
        if self.is_average and total.numel():
            whole = not (total.is_floating_point() or total.is_complex())
            total.div_(size, rounding_mode="trunc" if whole else None)


_OPERATIONS = {
    dist.ReduceOp.SUM: ReduceOperation("sum", torch.add, dist.ReduceOp.SUM),
    dist.ReduceOp.AVG: ReduceOperation("average", torch.add, dist.ReduceOp.SUM, is_average=True),
    dist.ReduceOp.MAX: ReduceOperation("max", torch.maximum, dist.ReduceOp.MAX),
    dist.ReduceOp.MIN: ReduceOperation("min", torch.minimum, dist.ReduceOp.MIN),
    dist.ReduceOp.PRODUCT: ReduceOperation("product", torch.mul, dist.ReduceOp.PRODUCT),
    dist.ReduceOp.BAND: ReduceOperation("and", torch.bitwise_and),
    dist.ReduceOp.BOR: ReduceOperation("or", torch.bitwise_or),
    dist.ReduceOp.BXOR: ReduceOperation("xor", torch.bitwise_xor),
}
