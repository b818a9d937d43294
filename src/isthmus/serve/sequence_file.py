"""A sequence with its cache as bytes: `pack_sequence` and `unpack_sequence`.

The layout is that of safetensors with a mark before and a digest behind: 8 bytes of mark, 8 with the length of the
header, the header as JSON, keys and values of all rows, and the SHA-256 of everything before it. It comes from another
site: its size is compared with what the receiving engine can hold before anything is allocated, each field has a bound,
and the header decides nothing about memory.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal, NoReturn

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from isthmus.core.errors import InputError
from isthmus.serve.batching.decode_records import DecodeRequest, SequenceKey

_MARK = b"ISTHMKV1"
_LENGTH_BYTES = 8
_DIGEST_BYTES = 32
_HEADER_BYTES_PER_TOKEN = 24
_OTHER_HEADER_BYTES = 64 * 1024

_DTYPES: dict[torch.dtype, Literal["float32", "bfloat16", "float16"]] = {
    torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16",
}  # fmt: skip

Number = Annotated[int, Field(ge=0, lt=2**62)]


class SequenceHeader(BaseModel):
    """What is known of a sequence beside its rows; `arithmetic` names what its bits follow from."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    arithmetic: Annotated[dict[str, str], Field(max_length=16)]
    version: Number
    uniform: bool
    num_rows: Number
    key: tuple[Number, Number, Number]
    seed: Annotated[int, Field(ge=-(2**62), lt=2**62)]
    prompt_tokens: list[Number]
    response_tokens: list[Number]
    max_response_tokens: Number
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    stop_tokens: list[Number]
    dtype: Literal["float32", "bfloat16", "float16"]

    @classmethod
    def of(
        cls, request: DecodeRequest, response_tokens: list[int], *, arithmetic: dict[str, str], version: int,
        uniform: bool, rows: torch.Tensor,
    ) -> SequenceHeader:  # fmt: skip
        """Return the header of a sequence with `rows` [2, layers, rows, KV heads, head size]."""
        return cls(
            arithmetic=arithmetic, version=version, uniform=uniform, num_rows=rows.shape[2],
            key=(request.key.prompt, request.key.sample, request.key.attempt), seed=request.seed,
            prompt_tokens=list(request.prompt_tokens), response_tokens=response_tokens,
            max_response_tokens=request.max_response_tokens, temperature=float(request.temperature),
            stop_tokens=sorted(request.stop_tokens), dtype=_DTYPES[rows.dtype],
        )  # fmt: skip

    def request(self) -> DecodeRequest:
        """Return the request that goes on after the response so far."""
        return DecodeRequest(
            key=SequenceKey(*self.key), seed=self.seed, prompt_tokens=tuple(self.prompt_tokens),
            response_tokens=tuple(self.response_tokens), max_response_tokens=self.max_response_tokens,
            temperature=self.temperature, stop_tokens=frozenset(self.stop_tokens),
        )  # fmt: skip


def pack_sequence(header: SequenceHeader, rows: torch.Tensor) -> bytes:
    """Return the bytes of a sequence with `rows` [2, layers, rows, KV heads, head size] in host memory."""
    text = header.model_dump_json().encode()
    data: bytes = rows.contiguous().view(torch.uint8).numpy().tobytes()
    content = _MARK + len(text).to_bytes(_LENGTH_BYTES, "little") + text + data
    return content + hashlib.sha256(content).digest()


def unpack_sequence(
    content: bytes, *, arithmetic: dict[str, str], max_tokens: int, row_shape: tuple[int, int, int], dtype: torch.dtype
) -> tuple[SequenceHeader, torch.Tensor]:
    """Return header and rows [2, layers, rows, KV heads, head size] of an engine whose rows have `row_shape`.

    `row_shape` is (layers, KV heads, head size), `max_tokens` the longest sequence of the engine. Raises `InputError`
    for content that is too large, cut, altered or of other arithmetic, and for rows that are not finite.
    """
    layers, kv_heads, head_size = row_shape
    row_bytes = 2 * layers * kv_heads * head_size * dtype.itemsize
    most = max_tokens * (row_bytes + _HEADER_BYTES_PER_TOKEN) + _OTHER_HEADER_BYTES
    begin = len(_MARK) + _LENGTH_BYTES
    if not begin + _DIGEST_BYTES < len(content) <= most:
        _reject(f"has {len(content)} bytes; this engine takes up to {most}")
    if content[: len(_MARK)] != _MARK:
        _reject("is of another format")
    if hashlib.sha256(memoryview(content)[:-_DIGEST_BYTES]).digest() != content[-_DIGEST_BYTES:]:
        _reject("is cut or altered")
    end = begin + int.from_bytes(content[len(_MARK) : begin], "little")
    if end > len(content) - _DIGEST_BYTES:
        _reject("has a header longer than itself")
    try:
        header = SequenceHeader.model_validate_json(content[begin:end])
    except ValidationError as error:
        _reject(f"has an invalid header: {error.errors()[0]['loc']}: {error.errors()[0]['msg'][:100]}")
    _check_header(header, arithmetic, dtype)
    if len(content) - _DIGEST_BYTES - end != header.num_rows * row_bytes:
        _reject(f"has {len(content) - _DIGEST_BYTES - end} bytes of cache, {header.num_rows} rows need another number")
    flat = torch.frombuffer(bytearray(content[end:-_DIGEST_BYTES]), dtype=dtype)
    rows = flat.reshape(2, layers, header.num_rows, kv_heads, head_size)
    if not bool(torch.isfinite(rows).all()):
        _reject("has a cache with NaN or infinity")
    return header, rows


def _check_header(header: SequenceHeader, arithmetic: dict[str, str], dtype: torch.dtype) -> None:
    differing = sorted(
        key for key in header.arithmetic.keys() | arithmetic.keys() if header.arithmetic.get(key) != arithmetic.get(key)
    )
    if differing:
        key = differing[0]
        _reject(
            f"is of other arithmetic: {key} is {header.arithmetic.get(key, 'missing')[:80]!r}, "
            f"here {arithmetic.get(key, 'missing')[:80]!r}"
        )
    if header.dtype != str(dtype).removeprefix("torch."):
        _reject(f"has a cache of {header.dtype}")
    num_tokens = len(header.prompt_tokens) + len(header.response_tokens)
    if not 0 < header.num_rows < num_tokens:
        _reject(f"has {header.num_rows} rows of {num_tokens} tokens")


def _reject(problem: str) -> NoReturn:
    raise InputError(
        f"the exported sequence {problem}", hint="add its tokens as a request; the cache is computed again"
    )
