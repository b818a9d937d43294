"""Closed forms of pipeline bubbles: what a schedule costs beyond computing, on equal stages and free wires.

`forward_s` and `backward_s` are the seconds of one micro-batch at one stage; of `backward_s`, `weight_s`
makes the weights' gradients. Every function returns the seconds by which an iteration of any number of micro-
batches (enough to fill the pipeline) exceeds the computing of one stage.
"""

from __future__ import annotations

from isthmus.core.errors import InputError


def one_f_one_b_bubble_s(num_stages: int, forward_s: float, backward_s: float) -> float:
    """Return (S - 1) (F + B), for `1f1b`, `gpipe` and `overlapped` alike.

    Source: D. Narayanan et al., SC 2021, section 2.2.
    """
    return (num_stages - 1) * (forward_s + backward_s)


def interleaved_bubble_s(num_stages: int, num_chunks: int, forward_s: float, backward_s: float) -> float:
    """Return (S - 1) (F + B) / v, for micro-batches in whole groups of S.

    Source: D. Narayanan et al., SC 2021, section 2.2.
    """
    return (num_stages - 1) * (forward_s + backward_s) / num_chunks


def zero_bubble_s(num_stages: int, forward_s: float, backward_s: float, weight_s: float) -> float:
    """Return (S - 1) (F + B - 2 W), for `zero_bubble` with W at most F and at most B - W.

    Source: P. Qi et al., ICLR 2024, table 2: (p - 1) (T_F + T_B - T_W), where T_B is without T_W.
    """
    _require_short(forward_s, backward_s, weight_s)
    return (num_stages - 1) * (forward_s + backward_s - 2 * weight_s)


def dualpipe_bubble_s(num_stages: int, forward_s: float, backward_s: float, weight_s: float) -> float:
    """Return (S / 2 - 1) (F + B - 2 W), for `dualpipe` with W <= B - W <= F <= B.

    The DeepSeek-V3 report (table 2) gives (S / 2 - 1) (F&B + B - 3 W), where F&B is a forward and a backward
    computed at once; here they follow each other, and the first one's output leaves before the second ends.
    """
    _require_short(forward_s, backward_s, weight_s)
    slack_s = 1e-9 * backward_s
    if not backward_s - weight_s - slack_s <= forward_s <= backward_s + slack_s:
        raise InputError(
            f"forward {forward_s} s beside a backward of {backward_s - weight_s} + {weight_s} s",
            hint="the closed form needs the forward between the inputs' part and the whole backward",
        )
    return (num_stages // 2 - 1) * (forward_s + backward_s - 2 * weight_s)


def mixed_chips_bubble_s(forward_s: float, speed_ratio: float, backward_ratio: float) -> float:
    """Return T_d (K - 1) (N + 1): what a fast chip waits per micro-batch for one K times as slow.

    `forward_s` is T_d, the forward of the faster chip; `speed_ratio` K how many times as fast it is;
    `backward_ratio` N the backward over the forward. Source: heterogeneous training paper, equation (1).
    """
    if speed_ratio < 1:
        raise InputError(f"speed ratio {speed_ratio}", hint="faster over slower: at least 1")
    return forward_s * (speed_ratio - 1) * (backward_ratio + 1)


def _require_short(forward_s: float, backward_s: float, weight_s: float) -> None:
    if weight_s > min(forward_s, backward_s - weight_s) + 1e-9 * backward_s:
        raise InputError(
            f"weight gradients of {weight_s} s, forward {forward_s} s, backward {backward_s} s",
            hint="the closed form needs the weights' part to be the shortest of the three",
        )
