"""Orders of a schedule that was searched for stages with a long delay between them."""

from __future__ import annotations

from isthmus.schedule import Hop, PipelineCosts, StageCosts, search_schedule, text_of_schedule


def wan_orders(num_stages: int, num_micro_batches: int) -> tuple[str, ...]:
    """Return the text of each stage: a message takes three forwards, and memory is that of 1F1B's first stage."""
    stages = (StageCosts(forward_s=1, backward_input_s=1, backward_weight_s=1, max_in_flight=num_stages),) * num_stages
    ends = [(s, s + 1) for s in range(num_stages - 1)] + [(s + 1, s) for s in range(num_stages - 1)]
    costs = PipelineCosts(stages=stages, hops=dict.fromkeys(ends, Hop(delay_s=3)))
    return text_of_schedule(search_schedule(costs, num_micro_batches).schedule)
