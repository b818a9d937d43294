"""`python -m isthmus.train.micro_benchmark`: what this machine's chip reaches, as JSON on standard output.

Matrix products of the shapes of transformer layers, the attention core, copies, and the launches of a small
layer's operations: what `isthmus calibrate --measure` fits the parameters of a chip to.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch.nn import functional

from isthmus.core.chip import Precision
from isthmus.plan.time.measure import Measurement, Timing

_TYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LAUNCHES = 28
"""Operations of a decoder layer's forward pass, about."""


def main() -> None:
    """Measure one device and print a `Measurement`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=sorted(_TYPES), default=None)
    parser.add_argument("--threads", type=int, default=1, help="threads of a CPU core's worth of work")
    parser.add_argument("--seconds", type=float, default=0.3, help="time for each benchmark")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    precision: Precision = args.precision or ("bf16" if args.device == "cuda" else "fp32")
    print(measure(args.device, precision, args.seconds).model_dump_json())


def measure(device: str, precision: Precision, seconds: float) -> Measurement:
    """Return the micro-benchmarks of `device` (`cpu` or `cuda`), each repeated for about `seconds`."""
    clock = _Clock(device, seconds)
    kind = _TYPES[precision]
    large = device == "cuda"
    with torch.no_grad():
        return Measurement(
            device=torch.cuda.get_device_name() if large else "cpu",
            precision=precision,
            matmul=tuple(_matmul(clock, kind, *shape) for shape in _shapes(large)),
            attention=tuple(_attention(clock, kind, n) for n in ((2048, 8192) if large else (256, 512))),
            memory=tuple(
                _copy(clock, kind, n) for n in ((1 << 27, 1 << 28) if large else (1 << 26, 1 << 27))
            ),
            launch=(_launches(clock, kind),),
        )


def _shapes(large: bool) -> list[tuple[int, int, int]]:
    """Return (rows, inner, columns) of products as layers make them."""
    rows, sizes = (8192, (4096, 8192)) if large else (512, (512, 1024))
    return [shape for h in sizes for shape in ((rows, h, h), (rows, h, 4 * h), (rows, 4 * h, h))]


class _Clock:
    """Times an operation, waiting for the device."""

    def __init__(self, device: str, seconds: float) -> None:
        self.device, self.seconds = device, seconds

    def wait(self) -> None:
        """Return when the device is idle."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def repeat(self, operation: Callable[[], object]) -> tuple[float, ...]:
        """Return the seconds of each repetition, at least three, after one that warms up."""
        operation()
        self.wait()
        taken: list[float] = []
        while len(taken) < 3 or (sum(taken) < self.seconds and len(taken) < 200):
            begun = time.perf_counter()
            operation()
            self.wait()
            taken.append(time.perf_counter() - begun)
        return tuple(taken)


def _matmul(clock: _Clock, kind: torch.dtype, m: int, k: int, n: int) -> Timing:
    a = torch.randn(m, k, dtype=kind, device=clock.device)
    b = torch.randn(k, n, dtype=kind, device=clock.device)
    seconds = clock.repeat(lambda: a @ b)
    return Timing(name=f"matmul-{m}x{k}x{n}", flops=2.0 * m * k * n, seconds=seconds)


def _attention(clock: _Clock, kind: torch.dtype, length: int) -> Timing:
    """Time the causal core; half of the products are counted, as a fused kernel makes only those."""
    heads, dim = 16, 128
    q, k, v = (torch.randn(1, heads, length, dim, dtype=kind, device=clock.device) for _ in range(3))
    seconds = clock.repeat(lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    return Timing(name=f"attention-{length}", flops=2.0 * heads * length * length * dim, seconds=seconds)


def _copy(clock: _Clock, kind: torch.dtype, num_bytes: int) -> Timing:
    source = torch.randn(num_bytes // kind.itemsize, dtype=kind, device=clock.device)
    target = torch.empty_like(source)
    seconds = clock.repeat(lambda: target.copy_(source))
    return Timing(name=f"copy-{num_bytes}", num_bytes=2.0 * num_bytes, seconds=seconds)


def _launches(clock: _Clock, kind: torch.dtype) -> Timing:
    """Time operations too small to keep a chip busy: what remains is the host."""
    one = torch.zeros(8, dtype=kind, device=clock.device)

    def layer() -> None:
        for _ in range(LAUNCHES):
            one.add_(1)

    return Timing(name="launches", seconds=clock.repeat(layer))


if __name__ == "__main__":
    main()
