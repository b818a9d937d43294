"""Products of 8-bit numbers in scaled blocks: their error, what is not finite, kernels, and layers that compute so."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from isthmus.train.kernels.linear_products import PLAIN, BlockScaledProducts, multiply_widened
from isthmus.train.kernels.scaled_blocks import BLOCK, MIN_SCALE, ScaledBlocks, scale_blocks
from isthmus.train.kernels.scaled_product_kernel import find_scaled_product, is_exact, multiply_by_kernel
from isthmus.train.model.deferred_weight_gradients import DeferredWeightGradients
from isthmus.train.model.layer_products import products_of
from isthmus.train.model.recompute import RecomputeKind, RecomputePolicy
from isthmus.train.model.stage_model import StageModel, build_stage
from tests.train.devices import needs_gpu
from tests.train.small_models import write_config

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = st.integers(1, 300)


def spread(seed: int, *shape: int, octaves: int = 40, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return random numbers of both signs [...] whose magnitudes cover `octaves` powers of two, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-octaves // 2, octaves // 2 + 1, shape, generator=generator)
    numbers = torch.randn(shape, generator=generator) * torch.exp2(powers.float())
    return numbers.masked_fill(torch.rand(shape, generator=generator) < 0.1, 0.0).to(dtype)


def scale_of_elements(blocks: ScaledBlocks) -> torch.Tensor:
    """Return the scale of each element's block [R, C]."""
    num_rows, num_columns = blocks.values.shape
    return blocks.scales.repeat_interleave(blocks.rows, 0).repeat_interleave(BLOCK, 1)[:num_rows, :num_columns]


def errors(matrix: torch.Tensor, rows: Any) -> torch.Tensor:
    """Return the largest error [R, C] (fp64) that the format permits for each element."""
    scales = scale_of_elements(scale_blocks(matrix, rows)).double()
    return torch.maximum(matrix.double().abs() / 16, scales * 2.0**-10)


@given(
    seed=st.integers(0, 2**32), num_rows=SIZES, num_columns=SIZES, rows=st.sampled_from([1, 128]),
    octaves=st.sampled_from([0, 20, 120]), dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)  # fmt: skip
def test_a_block_keeps_its_elements_within_the_formats_error(
    seed: int, num_rows: int, num_columns: int, rows: Any, octaves: int, dtype: torch.dtype
) -> None:
    """Each element within 1/16 of itself or 2^-10 of the scale; exact in bf16; scaling it again changes nothing."""
    matrix = spread(seed, num_rows, num_columns, octaves=octaves, dtype=dtype)
    blocks = scale_blocks(matrix, rows)
    wide = blocks.widened(torch.float32)
    assert blocks.values.dtype == torch.float8_e4m3fn
    assert bool(((wide.double() - matrix.double()).abs() <= errors(matrix, rows)).all())
    assert torch.equal(blocks.widened(torch.bfloat16).float(), wide)
    assert torch.equal(scale_blocks(wide, rows).widened(torch.float32), wide)
    assert bool((torch.frexp(blocks.scales).mantissa == 0.5).all())
    assert bool((blocks.scales >= MIN_SCALE).all())
    if rows == BLOCK:
        assert torch.equal(blocks.transposed().widened(torch.float32), wide.t())


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("rows", [1, 128])
def test_a_block_with_an_element_that_is_not_finite_is_not_finite(value: float, rows: Any) -> None:
    """So an overflow reaches the norm of the gradients; other blocks keep their elements."""
    matrix = spread(1, 130, 260)
    matrix[3, 140] = value
    wide = scale_blocks(matrix, rows).widened(torch.bfloat16)
    spoiled = torch.zeros(matrix.shape, dtype=torch.bool)
    spoiled[slice(3, 4) if rows == 1 else slice(0, 128), 128:256] = True
    assert not bool(wide[spoiled].isfinite().any())
    assert bool(wide[~spoiled].isfinite().all())


@given(seed=st.integers(0, 2**32), tokens=SIZES, inputs=SIZES, outputs=SIZES, with_bias=st.booleans())
def test_products_are_within_the_bound_of_their_operands(
    seed: int, tokens: int, inputs: int, outputs: int, with_bias: bool
) -> None:
    """All three of a layer, beside exact ones: the errors of operands, each times the other, and roundings of fp32."""
    x = spread(seed, tokens, inputs, octaves=12, dtype=torch.float32)
    weight = spread(seed + 1, outputs, inputs, octaves=6, dtype=torch.float32)
    gradient = spread(seed + 2, tokens, outputs, octaves=12, dtype=torch.float32)
    bias = spread(seed + 3, outputs, dtype=torch.float32) if with_bias else None
    products = BlockScaledProducts()

    def check(
        found: torch.Tensor, left: torch.Tensor, right: torch.Tensor, right_rows: Any, *, is_turned: bool
    ) -> None:
        """Compare `found` with `left` [M, K] times the transpose of `right` [N, K]."""
        off_left = errors(left, 1)
        off_right = errors(right.t().contiguous(), right_rows).t() if is_turned else errors(right, right_rows)
        a, b = left.double(), right.double()
        bound = a.abs() @ off_right.t() + off_left @ b.abs().t() + off_left @ off_right.t()
        bound += 1e-5 * ((a.abs() + off_left) @ (b.abs() + off_right).t()) + 1e-30
        assert bool(((found.double() - a @ b.t()).abs() <= bound).all())

    forward = products.forward(x, weight, bias)
    check(forward if bias is None else products.forward(x, weight, None), x, weight, 128, is_turned=False)
    if bias is not None:
        assert torch.equal(forward, products.forward(x, weight, None) + bias)
    check(products.input_gradient(gradient, weight), gradient, weight.t(), 128, is_turned=True)
    check(products.weight_gradient(gradient, x), gradient.t(), x.t(), 1, is_turned=False)


def test_products_are_of_eight_bits_and_agree_in_bf16() -> None:
    """They differ from plain products by percents, and those in bf16 from those in fp32 by one rounding."""
    x, weight = spread(1, 256, 384, octaves=2), spread(2, 128, 384, octaves=2)
    found = BlockScaledProducts().forward(x, weight, None)
    wide = BlockScaledProducts().forward(x.float(), weight.float(), None)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wide, rtol=2.0**-8, atol=2.0**-8 * wide.abs().max().item() / 10)
    exact = x.double() @ weight.double().t()
    apart = (wide.double() - exact).norm() / exact.norm()
    assert 1e-3 < apart < 5e-2


def test_operands_reach_the_kernel_in_its_layout() -> None:
    """torch's own checks of the kernel accept layouts and scales of the three products; others go to bf16."""
    shapes = {"x": (256, 384), "weight": (640, 384), "gradient": (256, 640)}
    given_ = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
    called: list[tuple[int, int]] = []

    def multiply(left: ScaledBlocks, right: ScaledBlocks, dtype: torch.dtype) -> torch.Tensor:
        called.append((left.rows, right.rows))
        return multiply_by_kernel(left, right, dtype)

    products = BlockScaledProducts(multiply)
    assert products.forward(given_["x"], given_["weight"], None).shape == (256, 640)
    assert products.input_gradient(given_["gradient"], given_["weight"]).shape == (256, 384)
    assert products.weight_gradient(given_["gradient"], given_["x"]).shape == (640, 384)
    assert called == [(1, 128), (1, 128), (1, 1)]
    short = scale_blocks(spread(1, 20, 100), 1)
    assert torch.equal(multiply_by_kernel(short, short, torch.bfloat16), multiply_widened(short, short, torch.bfloat16))


def test_a_kernel_that_computes_anything_else_is_not_used() -> None:
    """A CPU has none; one that leaves out a scale, or raises, fails the comparison; the right product passes it."""

    def without_scales(left: ScaledBlocks, right: ScaledBlocks, dtype: torch.dtype) -> torch.Tensor:
        return left.values.to(dtype) @ right.widened(dtype).t()

    def refusing(left: ScaledBlocks, right: ScaledBlocks, dtype: torch.dtype) -> torch.Tensor:
        raise NotImplementedError("only supported on another device")

    cpu = torch.device("cpu")
    assert find_scaled_product(cpu) is None
    assert is_exact(multiply_widened, cpu)
    assert not is_exact(without_scales, cpu)
    assert not is_exact(refusing, cpu)


@needs_gpu
@pytest.mark.gpu
def test_the_kernel_of_a_card_computes_the_same_products() -> None:
    """On CUDA capability 9.0 there is one, and it passes the comparison."""
    card = torch.device("cuda", 0)
    assert (find_scaled_product(card) is not None) == (torch.cuda.get_device_capability(card) == (9, 0))


def gradients(stage: StageModel, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradients of a stage by name, that of its input [B, S, H] too."""
    found = {name: one.grad.clone() for name, one in stage.named_parameters() if one.grad is not None}
    return found | {"input": hidden.grad.clone()}


@pytest.mark.parametrize(
    ("variant", "kind"), [("llama", "none"), ("llama", "selective"), ("mixtral", "full"), ("qwen3-moe", "moe")]
)
def test_layers_and_experts_compute_in_blocks_alike_however_scheduled(
    variant: str, kind: RecomputeKind, tmp_path: Path
) -> None:
    """Projections, dense layers and experts, not the head: close to bf16; the same bits recomputed, and split."""
    folder = write_config(tmp_path, variant)
    hidden, target = spread(1, 2, 40, 64, octaves=0), spread(2, 2, 40, 64, octaves=0).float()

    def build(**options: Any) -> StageModel:
        return build_stage(folder, (2, 4), dtype=torch.bfloat16, device="cpu", seed=0, weights="random", **options)

    def run(stage: StageModel, policy: RecomputePolicy, deferred: DeferredWeightGradients | None = None) -> Any:
        x = hidden[..., : stage.hidden_size].clone().requires_grad_()
        out = (stage.compute(x, policy)[0].float() * target[..., : stage.hidden_size]).sum()
        if deferred is None:
            out.backward()
        else:
            with deferred.defer((0, 0)):
                out.backward()
            deferred.compute_gradients((0, 0))
        return out.item(), gradients(stage, x)

    plain, plain_gradients = run(build(), RecomputePolicy())
    stage = build(products=BlockScaledProducts())
    assert products_of(stage.lm_head) is PLAIN
    assert all(
        isinstance(products_of(one), BlockScaledProducts)
        for one in stage.model.layers.modules()
        if isinstance(one, nn.Linear)
    )
    usual = run(stage, RecomputePolicy())
    assert usual[1].keys() == plain_gradients.keys()
    norms = [(one.float().norm(), (one - plain_gradients[name]).float().norm()) for name, one in usual[1].items()]
    whole, apart = torch.tensor(norms).square().sum(0).sqrt()
    assert 0 < apart < 0.2 * whole
    assert usual[0] != plain
    for other in (
        run(build(products=BlockScaledProducts()), RecomputePolicy(kind)),
        run(split := build(products=BlockScaledProducts()), RecomputePolicy(kind), DeferredWeightGradients([split])),
    ):
        assert other[0] == usual[0]
        assert all(torch.equal(other[1][name], one) for name, one in usual[1].items())
