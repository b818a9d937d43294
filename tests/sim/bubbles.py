"""Closed forms of pipeline bubbles, for equal stages and communication that takes no time.

`forward_s` and `backward_s` are the times of one micro-batch at one stage; `weight_s` is the part of
`backward_s` that computes weight gradients. Every function returns the seconds by which an iteration exceeds
the compute time of one stage, for any number of micro-batches that fills the pipeline.
"""

from __future__ import annotations

from isthmus.core.errors import InputError


def one_f_one_b_bubble_s(num_stages: int, forward_s: float, backward_s: float) -> float:
    """Return (S - 1) (F + B), for `1f1b`, `gpipe` and `overlapped`.

    Source: D. Narayanan et al., SC 2021, section 2.2.
    """
    return (num_stages - 1) * (forward_s + backward_s)


def interleaved_bubble_s(num_stages: int, num_chunks: int, forward_s: float, backward_s: float) -> float:
    """Return (S - 1) (F + B) / v, for a number of micro-batches that is a multiple of S.

    Source: D. Narayanan et al., SC 2021, section 2.2.
    """
    return (num_stages - 1) * (forward_s + backward_s) / num_chunks


def zero_bubble_s(num_stages: int, forward_s: float, backward_s: float, weight_s: float) -> float:
    """Return (S - 1) (F + B - 2 W), for `zero_bubble` with W at most F and at most B - W.

    Source: P. Qi et al., ICLR 2024, table 2: (p - 1) (T_F + T_B - T_W), where T_B excludes T_W.
    """
    _require_short_weight(forward_s, backward_s, weight_s)
    return (num_stages - 1) * (forward_s + backward_s - 2 * weight_s)


def dualpipe_bubble_s(num_stages: int, forward_s: float, backward_s: float, weight_s: float) -> float:
    """Return (S / 2 - 1) (F + B - 2 W), for `dualpipe` with W <= B - W <= F <= B.

    The DeepSeek-V3 report (table 2) gives (S / 2 - 1) (F&B + B - 3 W), where F&B is an overlapped forward and
    backward; here they run one after the other, and the output of the first leaves before the second ends.
    """
    _require_short_weight(forward_s, backward_s, weight_s)
    slack_s = 1e-9 * backward_s
    if not backward_s - weight_s - slack_s <= forward_s <= backward_s + slack_s:
        raise InputError(
            f"forward {forward_s} s, backward {backward_s - weight_s} + {weight_s} s",
            hint="the closed form needs a forward between the input-gradient part and the whole backward",
        )
    return (num_stages // 2 - 1) * (forward_s + backward_s - 2 * weight_s)


def mixed_chips_bubble_s(forward_s: float, speed_ratio: float, backward_ratio: float) -> float:
    """Return T_d (K - 1) (N + 1): the idle time of a fast chip per micro-batch, next to one K times slower.

    `forward_s` is T_d, the forward time of the faster chip; `speed_ratio` is K; `backward_ratio` is N, the
    backward time over the forward time. Source: heterogeneous training paper, equation (1).
    """
    if speed_ratio < 1:
        raise InputError(f"speed ratio {speed_ratio}", hint="it must be at least 1: faster over slower")
    return forward_s * (speed_ratio - 1) * (backward_ratio + 1)


def _require_short_weight(forward_s: float, backward_s: float, weight_s: float) -> None:
    if weight_s > min(forward_s, backward_s - weight_s) + 1e-9 * backward_s:
        raise InputError(
            f"weight gradients of {weight_s} s, forward {forward_s} s, backward {backward_s} s",
            hint="the closed form needs weight gradients to take at most the forward and the input gradients",
        )
