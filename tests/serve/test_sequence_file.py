"""Rules of exported sequences: what was packed comes back, and any other bytes are a named error of bounded memory."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.errors import InputError
from isthmus.serve import DecodeRequest, SequenceKey
from isthmus.serve.sequence_file import SequenceHeader, pack_sequence, unpack_sequence

SHAPE = (2, 1, 4)
ARITHMETIC = {"model": "m", "torch": "1"}
REQUEST = DecodeRequest(
    key=SequenceKey(3, 1), seed=5, prompt_tokens=(1, 2, 3), max_response_tokens=9, temperature=0.5,
    stop_tokens=frozenset({7}),
)  # fmt: skip


def packed(dtype: torch.dtype = torch.float32) -> tuple[bytes, torch.Tensor]:
    """Return an export of four rows, and the rows [2, 2, 4, 1, 4]."""
    rows = torch.randn(2, 2, 4, 1, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    header = SequenceHeader.of(REQUEST, [4, 5], arithmetic=ARITHMETIC, version=2, uniform=True, rows=rows)
    return pack_sequence(header, rows), rows


def unpack(content: bytes, **changed: Any) -> tuple[SequenceHeader, torch.Tensor]:
    """Unpack for an engine of the same arithmetic, of sequences of up to 20 tokens."""
    options = {"arithmetic": ARITHMETIC, "max_tokens": 20, "row_shape": SHAPE, "dtype": torch.float32, **changed}
    return unpack_sequence(content, **options)


def forged(change: Any, data: bytes | None = None) -> bytes:
    """Return an export with a changed header and a digest that fits."""
    content, _ = packed()
    length = int.from_bytes(content[8:16], "little")
    header = json.loads(content[16 : 16 + length])
    change(header)
    text = json.dumps(header).encode()
    body = content[:8] + len(text).to_bytes(8, "little") + text + (content[16 + length : -32] if data is None else data)
    return body + hashlib.sha256(body).digest()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sequence_comes_back(dtype: torch.dtype) -> None:
    """Its request with the response so far, and the bits of its rows."""
    content, rows = packed(dtype)
    header, found = unpack(content, dtype=dtype)
    assert torch.equal(found, rows)
    request = header.request()
    assert request.response_tokens == (4, 5)
    assert (request.key, request.seed, request.prompt_tokens) == (REQUEST.key, REQUEST.seed, REQUEST.prompt_tokens)
    assert (request.temperature, request.stop_tokens) == (REQUEST.temperature, REQUEST.stop_tokens)
    assert (header.version, header.uniform, header.num_rows) == (2, True, 4)


@pytest.mark.attack
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damage_is_found(data: st.DataObject) -> None:
    """Any change of one byte, any cut and any bytes at all."""
    content, _ = packed()
    place = data.draw(st.integers(0, len(content) - 1))
    altered = bytearray(content)
    altered[place] ^= data.draw(st.integers(1, 255))
    for wrong in (bytes(altered), content[:place], content + b"x", data.draw(st.binary(max_size=300))):
        with pytest.raises(InputError):
            unpack(wrong)


@pytest.mark.attack
@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.update(num_rows=5),
        lambda one: one.update(num_rows=0),
        lambda one: one.update(num_rows=2**61),
        lambda one: one.update(num_rows=2**80),
        lambda one: one.update(num_rows=-1),
        lambda one: one.update(num_rows=True),
        lambda one: one.update(prompt_tokens=[1, -2]),
        lambda one: one.update(prompt_tokens="abc"),
        lambda one: one.update(key=[1, 2]),
        lambda one: one.update(temperature=-1),
        lambda one: one.update(dtype="float64"),
        lambda one: one.update(dtype="bfloat16"),
        lambda one: one.update(unknown=1),
        lambda one: one.pop("seed"),
        lambda one: one.update(arithmetic={"model": "other", "torch": "1"}),
        lambda one: one.update(arithmetic={"model": "m"}),
        lambda one: one.update(arithmetic={str(key): "x" for key in range(99)}),
    ],
)
def test_a_forged_header_is_refused(change: Any) -> None:
    """Also where the digest fits: sizes, types, fields and arithmetic are checked."""
    with pytest.raises(InputError, match="the exported sequence"):
        unpack(forged(change))


def test_a_cache_that_is_not_finite_is_refused() -> None:
    """It would turn the attention of every later token to NaN."""
    num = 2 * 2 * 4 * 4
    with pytest.raises(InputError, match="NaN or infinity"):
        unpack(forged(lambda one: None, torch.full((num,), float("inf")).numpy().tobytes()))


@pytest.mark.attack
def test_nothing_is_allocated_for_what_is_too_large() -> None:
    """A content above the largest sequence of the engine, and a header that promises more than there is."""
    content, _ = packed()
    large = bytes(50_000_000)
    long = content[:8] + (2**63).to_bytes(8, "little") + content[16:-32]
    tracemalloc.start()
    for wrong in (large, long + hashlib.sha256(long).digest(), forged(lambda one: one.update(num_rows=2**60))):
        with pytest.raises(InputError):
            unpack(wrong)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
