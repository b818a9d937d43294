"""Decoding: engines that turn prompts into responses, behind one interface."""

from isthmus.serve.batching.decode_records import (
    DecodeEvent,
    DecodeRequest,
    DecodingEnded,
    OnSwitch,
    SequenceKey,
    TokenDecoded,
)
from isthmus.serve.decode_engine import DecodeEngine
from isthmus.serve.draw_token import TokenDistribution, draw_number, draw_token
from isthmus.serve.paged.paged_engine import DrawToken, PagedEngine, PagedEngineConfig

__all__ = [
    "DecodeEngine",
    "DecodeEvent",
    "DecodeRequest",
    "DecodingEnded",
    "DrawToken",
    "OnSwitch",
    "PagedEngine",
    "PagedEngineConfig",
    "SequenceKey",
    "TokenDecoded",
    "TokenDistribution",
    "draw_number",
    "draw_token",
]
