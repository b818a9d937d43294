"""Benchmark this machine's chip and print JSON: `python -m isthmus.train.measure.measure_chip`.

Measures matrix products of transformer shapes, attention, memory copies and kernel launches, to which
`isthmus calibrate --measure` fits the parameters of the chip. With `--model` it also measures the parts of
that model (`isthmus.train.measure.measure_model_parts`).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from isthmus.core.chip import Precision
from isthmus.plan import Measurement, Timing
from isthmus.train.measure.measure_model_parts import measure_model_parts
from isthmus.train.measure.operation_timer import OperationTimer, time_interleaved

_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAUNCHES_PER_LAYER = 28
"""Approximate number of kernel launches in the forward pass of a decoder layer."""


def main() -> None:
    """Benchmark one device and print a `Measurement` as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=sorted(_DTYPES), default=None)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch")
    parser.add_argument("--seconds", type=float, default=0.1, help="time per benchmark, in seconds")
    parser.add_argument("--core", type=int, default=None, help="CPU core to pin the process to")
    parser.add_argument("--model", default=None, help="also time the parts of this model, on the CPU")
    parser.add_argument("--micro-batch", type=int, default=1, help="samples per micro-batch of that model")
    parser.add_argument("--sequence", type=int, default=128, help="tokens per sample of that model")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    precision: Precision = args.precision or ("bf16" if args.device == "cuda" else "fp32")
    shape = None
    if args.model is not None:
        shape = measure_model_parts(args.model, args.micro_batch, args.sequence, seconds=5 * args.seconds)
    found = measure_chip(args.device, precision, args.seconds)
    print(found.model_copy(update={"shape": shape}).model_dump_json())


@dataclass(frozen=True)
class _Benchmark:
    """An operation, its work, and the field of `Measurement` that gets its timing."""

    # Field of `Measurement`: "matmul", "attention", "memory" or "launch".
    kind: str
    name: str
    operation: Callable[[], object]
    # Work of one call; 0 if not applicable.
    flops: float = 0.0
    num_bytes: float = 0.0


def measure_chip(device: str, precision: Precision, seconds: float) -> Measurement:
    """Run all micro-benchmarks on `device` (`cpu` or `cuda`), interleaved, each for about `seconds`."""
    clock, large = OperationTimer(device), device == "cuda"
    benchmarks = list(_benchmarks(_TensorFactory(device, _DTYPES[precision]), large))
    with torch.no_grad():
        taken = time_interleaved([partial(clock.time_s, one.operation) for one in benchmarks], seconds)
    found: dict[str, tuple[Timing, ...]] = {}
    for one, each_s in zip(benchmarks, taken, strict=True):
        timing = Timing(name=one.name, flops=one.flops, num_bytes=one.num_bytes, seconds=each_s)
        found[one.kind] = (*found.get(one.kind, ()), timing)
    return Measurement(
        device=torch.cuda.get_device_name() if large else "cpu",
        precision=precision,
        matmul=found["matmul"],
        attention=found["attention"],
        memory=found["memory"],
        launch=found["launch"],
    )


@dataclass(frozen=True)
class _TensorFactory:
    """Makes random tensors of one dtype on one device."""

    device: str
    dtype: torch.dtype

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=self.dtype, device=self.device)


def _benchmarks(tensors: _TensorFactory, is_gpu: bool) -> Iterator[_Benchmark]:
    for shape in _matmul_shapes(is_gpu):
        yield _matmul(tensors, *shape)
    for length in (2048, 8192) if is_gpu else (256, 512):
        yield _attention(tensors, length)
    for num_bytes in (1 << 27, 1 << 28) if is_gpu else (1 << 26, 1 << 27):
        yield _copy(tensors, num_bytes)
    yield _launches(tensors)


def _matmul_shapes(is_gpu: bool) -> list[tuple[int, int, int]]:
    """Return (rows, inner, columns) of the matrix products of transformer layers."""
    rows, sizes = (8192, (4096, 8192)) if is_gpu else (512, (512, 1024))
    return [shape for h in sizes for shape in ((rows, h, h), (rows, h, 4 * h), (rows, 4 * h, h))]


def _matmul(tensors: _TensorFactory, m: int, k: int, n: int) -> _Benchmark:
    a, b = tensors.random(m, k), tensors.random(k, n)
    return _Benchmark("matmul", f"matmul-{m}x{k}x{n}", lambda: a @ b, flops=2.0 * m * k * n)


def _attention(tensors: _TensorFactory, length: int) -> _Benchmark:
    """Return causal attention; counts half of the FLOPs, because fused kernels skip the masked half."""
    heads, dim = 16, 128
    q, k, v = (tensors.random(1, heads, length, dim) for _ in range(3))

    def core() -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return _Benchmark("attention", f"attention-{length}", core, flops=2.0 * heads * length * length * dim)


def _copy(tensors: _TensorFactory, num_bytes: int) -> _Benchmark:
    source = tensors.random(num_bytes // tensors.dtype.itemsize)
    target = torch.empty_like(source)
    return _Benchmark("memory", f"copy-{num_bytes}", lambda: target.copy_(source), num_bytes=2.0 * num_bytes)


def _launches(tensors: _TensorFactory) -> _Benchmark:
    """Return operations so small that their time is host launch overhead."""
    one = torch.zeros(8, dtype=tensors.dtype, device=tensors.device)

    def layer() -> None:
        for _ in range(LAUNCHES_PER_LAYER):
            one.add_(1)

    return _Benchmark("launch", "launches", layer)


if __name__ == "__main__":
    main()
