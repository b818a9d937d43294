"""Rules of wire formats: stated sizes and error bounds hold; what cannot be expressed is a named error."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from isthmus.comm.wire_formats.block_int8 import BlockInt8
from isthmus.comm.wire_formats.error_feedback import ErrorFeedback
from isthmus.comm.wire_formats.known_formats import WIRE_FORMATS
from isthmus.switch import NonFiniteError

FORMATS = list(WIRE_FORMATS.values())
VALUES = arrays.arrays(
    np.float32, st.integers(0, 700), elements=st.floats(-(2.0**120), 2.0**120, width=32), fill=st.just(0.0)
)


@pytest.mark.parametrize("wire_format", FORMATS, ids=lambda one: one.name)
@given(values=VALUES)
def test_values_come_back_within_the_bound(wire_format, values):
    """Encoded bytes have the stated size, and no decoded value is off by more than the stated bound."""
    data = wire_format.encode(values)
    assert data.dtype == np.uint8
    assert len(data) == wire_format.num_bytes(len(values))
    got = wire_format.decode(data, len(values))
    assert got.dtype == np.float32
    error = np.abs(got.astype(np.float64) - values.astype(np.float64))
    assert (error <= wire_format.error_bound(values)).all()


def test_sizes_are_what_the_names_say():
    """Bytes of 1,024 values: 4, 2 and 1 a value, and the scales."""
    assert {name: one.num_bytes(1024) for name, one in WIRE_FORMATS.items()} == {
        "fp32": 4096, "bf16": 2048, "scaled-int32": 4100, "scaled-int16": 2052, "block-int8": 1024 + 16,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["scaled-int32", "scaled-int16", "block-int8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scaled_formats_refuse_what_is_not_finite(name, bad):
    """NaN and infinity are errors that name the format; nothing is sent."""
    values = np.ones(300, np.float32)
    values[299] = bad
    with pytest.raises(NonFiniteError, match=f"which {name} cannot express"):
        WIRE_FORMATS[name].encode(values)


def test_bf16_passes_nan_and_infinity_and_refuses_overflow():
    """NaN stays NaN, infinity infinity; a finite value never becomes infinite."""
    one = WIRE_FORMATS["bf16"]
    got = one.decode(one.encode(np.array([np.nan, np.inf, -np.inf, 1.5], np.float32)), 4)
    assert np.isnan(got[0])
    assert got[1:].tolist() == [np.inf, -np.inf, 1.5]
    with pytest.raises(NonFiniteError, match="exceeds bfloat16"):
        one.encode(np.array([np.finfo(np.float32).max], np.float32))


@given(st.integers(1, 40), st.integers(0, 2**32))
def test_error_feedback_bounds_the_accumulated_error(num_steps, seed):
    """After any number of steps, the sum of what was sent is off by at most one residual, of m / 253."""
    numbers, feedback, wire_format = np.random.default_rng(seed), ErrorFeedback(), BlockInt8()
    exact, sent = np.zeros(600), np.zeros(600)
    for _ in range(num_steps):
        values = numbers.uniform(-1, 1, 600).astype(np.float32)
        data, decoded = feedback.encode("bucket", values, wire_format)
        np.testing.assert_array_equal(wire_format.decode(data, 600), decoded)
        exact += values
        sent += decoded
    assert feedback.largest <= 1 / 253 + 1e-6
    assert np.abs(sent - exact).max() <= 1 / 253 + 1e-6 * num_steps


def test_without_feedback_the_error_grows():
    """The comparison: a small value beside a large one is lost at each step without feedback."""
    values = np.full(256, 0.001, np.float32)
    values[0] = 1.0
    plain = sum(BlockInt8().decode(BlockInt8().encode(values), 256) for _ in range(100))
    feedback = ErrorFeedback()
    kept = sum(feedback.encode("bucket", values, BlockInt8())[1] for _ in range(100))
    assert plain[1] == 0
    assert abs(kept[1] - 0.1) <= 1 / 253
