"""Norms: the parameters of each kind, and the tensors that autograd saves for it."""

from __future__ import annotations

from typing import Literal

from isthmus.plan.profile.component import SavedTensor
from isthmus.plan.profile.layer_shapes import NormKind


def norm_parameters(kind: NormKind, width: int) -> int:
    """Return the parameters of one norm over `width` elements."""
    return 2 * width if kind == "layer" else width


def norm_saved_tensors(
    name: str, kind: NormKind, width: int, *, cut: Literal["tp", "sp", "none"] = "sp", groups: int = 1
) -> tuple[SavedTensor, ...]:
    """Return the tensors that a norm over `width` saves: input, statistics of `groups` rows, scaled input.

    An RMS norm computes on an fp32 copy of its input and saves that copy.
    """
    if kind in ("layer", "layer_gain"):
        return (
            SavedTensor(name=f"{name}.input", width=width, cut=cut),
            SavedTensor(name=f"{name}.statistics", width=2 * groups, element_bytes=4, cut=cut),
        )
    scaled = 4 if kind == "rms_fp32" else None
    return (
        SavedTensor(name=f"{name}.input", width=width, element_bytes=4, cut=cut),
        SavedTensor(name=f"{name}.statistics", width=groups, element_bytes=4, cut=cut),
        SavedTensor(name=f"{name}.scaled", width=width, element_bytes=scaled, cut=cut, recomputable=True),
    )
