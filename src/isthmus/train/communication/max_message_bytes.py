"""`max_message_bytes`: the longest message between ranks of a run, as its plan and model bound it."""

from __future__ import annotations

from isthmus.core.model import Model
from isthmus.core.plan import Plan

_FLOAT_BYTES = 4
_SMALL_BYTES = 64 * 2**20
"""Room for what does not grow with the model: buckets of gradients, pieces of snapshots, layouts of checkpoints."""


def max_message_bytes(plan: Plan, model: Model) -> int:
    """Return a bound in bytes: activations of a micro-batch, or the embedding, the largest parameter, both in fp32."""
    activations = plan.micro_batch_size * plan.sequence_length * model.hidden_size
    embedding = model.vocab_size * model.hidden_size
    return max(_SMALL_BYTES, _FLOAT_BYTES * activations, _FLOAT_BYTES * embedding)
