"""`exchange_buffer_bytes`: memory that a layer's exchanges hold beside the tensors that the backward pass needs."""

from __future__ import annotations

from isthmus.plan.memory.backward_peak import MicroBatchLoad
from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.profile.layer_profile import LayerProfile


def exchange_buffer_bytes(layer: LayerProfile, degrees: StageDegrees, load: MicroBatchLoad) -> float:
    """Return the bytes on one chip of the largest exchange of `layer`; one exchange runs at a time.

    `gather` holds keys and values of the whole sequence, `ring` those that arrive and those that leave, `all_to_all`
    a copy of query, key, value and result. Experts with `all_gather` hold the tokens of the whole expert group.
    """
    each = load.tokens * load.precision_bytes
    context = experts = 0.0
    core = layer.attention.core
    if degrees.cp > 1 and core is not None:
        pair = each * layer.exchanged_kv_width / degrees.tp
        own = each * core.num_heads * (core.key_dim + core.value_dim) / degrees.tp
        context = {"gather": degrees.sequence_parts * pair, "ring": 2 * pair, "all_to_all": pair + own}[degrees.cp_kind]
    if degrees.ep > 1 and layer.feed_forward.num_experts and degrees.experts.dispatcher == "all_gather":
        experts = degrees.ep * each * layer.hidden_size / (degrees.tp if degrees.sp else 1)
    return max(context, experts)
