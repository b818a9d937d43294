"""`expert_arguments`: experts and their router as the `--moe-...` options of Megatron-LM."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from isthmus.plan.export.decoder_config import DecoderConfig, Router
from isthmus.plan.export.flag import Flag, flag
from isthmus.plan.export.incompatibility import Incompatibility


def expert_incompatibilities(decoder: DecoderConfig) -> Iterator[Incompatibility]:
    """Yield the properties of a router that the options cannot express."""
    router = decoder.router
    if not decoder.expert_blocks:
        return
    if router.groups > 1 and not router.sigmoid:
        yield Incompatibility(
            "expert groups ranked by their best expert: it ranks them by the sum of several",
            final="train it with its own code",
        )
    if router.sigmoid and not router.renormalised:
        yield Incompatibility(
            "sigmoid router without normalised expert weights", final="set norm_topk_prob in config.json"
        )


def expert_arguments(decoder: DecoderConfig, tp: int, ep: int) -> list[Flag]:
    """Return the options of a decoder with experts, sharded over `ep` ranks, or by `tp` if `ep` is 1."""
    router = decoder.router
    experts = decoder.expert_blocks[0]
    flags = [
        flag("num-experts", experts.num_experts),
        flag("moe-router-topk", experts.experts_per_token),
        flag("moe-ffn-hidden-size", experts.intermediate_size),
        flag("moe-router-load-balancing-type", "aux_loss"),
        flag("moe-aux-loss-coeff", router.balance_weight),
        flag("moe-token-dispatcher-type", "alltoall"),
        flag("moe-grouped-gemm"),
        flag("expert-model-parallel-size", ep),
        flag("expert-tensor-parallel-size", tp if ep == 1 else 1),
    ]
    if len(decoder.expert_blocks) < len(decoder.feed_forwards):
        runs = itertools.groupby(bool(block.num_experts) for block in decoder.feed_forwards)
        pattern = "+".join(f"[{int(sparse)}]*{len(list(run))}" for sparse, run in runs)
        flags.append(flag("moe-layer-freq", f"({pattern})"))
    if experts.shared_size:
        flags.append(flag("moe-shared-expert-intermediate-size", experts.shared_size))
    if experts.shared_gate:
        flags.append(flag("moe-shared-expert-gate"))
    return flags + _router_arguments(router)


def _router_arguments(router: Router) -> list[Flag]:
    """Return the options of the router; by default the weights of the chosen experts sum to one."""
    flags = []
    if router.sigmoid:
        flags.append(flag("moe-router-score-function", "sigmoid"))
    elif not router.renormalised:
        flags.append(flag("moe-router-pre-softmax"))
    if router.bias:
        flags.append(flag("moe-router-enable-expert-bias"))
    if router.groups > 1:
        flags += [
            flag("moe-router-num-groups", router.groups),
            flag("moe-router-group-topk", router.groups_chosen),
        ]
    if router.scale != 1.0:
        flags.append(flag("moe-router-topk-scaling-factor", router.scale))
    return flags
