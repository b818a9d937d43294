"""Norms: the parameters of each kind, and the tensors that autograd saves for it."""

from __future__ import annotations

from typing import Literal

from isthmus.plan.profile.component import Saved

NormKind = Literal["rms", "rms_fp32", "layer"]
"""`rms` scales in the compute precision (Llama), `rms_fp32` in fp32 (Gemma, GPT-OSS); `layer`: LayerNorm."""


def norm_parameters(kind: NormKind, width: int) -> int:
    """Return the parameters of one norm over `width` elements."""
    return 2 * width if kind == "layer" else width


def norm_saved(
    name: str, kind: NormKind, width: int, *, cut: Literal["tp", "sp", "none"] = "sp", groups: int = 1
) -> tuple[Saved, ...]:
    """Return the tensors that a norm over `width` saves: input, statistics of `groups` rows, scaled input.

    An RMS norm computes on an fp32 copy of its input and saves that copy.
    """
    if kind == "layer":
        return (
            Saved(name=f"{name}.input", width=width, cut=cut),
            Saved(name=f"{name}.statistics", width=2 * groups, bytes_each=4, cut=cut),
        )
    scaled = 4 if kind == "rms_fp32" else None
    return (
        Saved(name=f"{name}.input", width=width, bytes_each=4, cut=cut),
        Saved(name=f"{name}.statistics", width=groups, bytes_each=4, cut=cut),
        Saved(name=f"{name}.scaled", width=width, bytes_each=scaled, cut=cut, cheap=True),
    )
