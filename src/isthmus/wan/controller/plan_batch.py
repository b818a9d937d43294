"""`plan_batch`: paths for many requests at once, so that the most bandwidth over time is admitted.

Requests are planned one after the other; those that found no path go to the front of the next round, and paths keep
away from loaded pipes by a weight that changes with the rounds, and vary at random. The best round counts ("squeaky
wheel" optimisation: D. Joslin, D. Clements, Journal of Artificial Intelligence Research 10, 1999).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from isthmus.wan.control.wan_topology import PathRefusal, PathRequest
from isthmus.wan.controller.path_plan import PathPlan, plan_path
from isthmus.wan.controller.pipe_bookings import PipeBookings
from isthmus.wan.controller.wan_network import NetworkPipe, WanNetwork

LOAD_WEIGHTS = (0.0, 1.0, 4.0, 16.0)
"""Of the rounds in turn: how many times its delay a full pipe costs more."""
MAX_NOISE = 2.0
"""Of the random factor of each pipe, from the second turn of the weights on."""


def plan_batch(
    network: WanNetwork, bookings: PipeBookings, requests: Sequence[PathRequest], rng: Random, num_rounds: int = 40
) -> dict[str, PathPlan]:
    """Return the plans of the best of `num_rounds` rounds, by name; `bookings` is as before at the end.

    A request counts by its bandwidth times its duration. All admitted: no more rounds.
    """
    values = {one.name: one.bandwidth_gbps * (one.end_s - one.start_s) for one in requests}
    order = sorted(requests, key=lambda one: -values[one.name])
    best: dict[str, PathPlan] = {}
    best_value = -1.0
    for number in range(num_rounds):
        noise = 0.0 if number < len(LOAD_WEIGHTS) else MAX_NOISE
        factors = {pipe.name: 1 + rng.uniform(0, noise) for pipe in network.pipes}
        plans, refused = _one_round(network, bookings, order, LOAD_WEIGHTS[number % len(LOAD_WEIGHTS)], factors)
        value = sum(values[name] for name in plans)
        if value > best_value:
            best, best_value = plans, value
        if not refused:
            break
        order = _next_order(order, refused, values, rng)
    return best


def _one_round(
    network: WanNetwork,
    bookings: PipeBookings,
    order: Sequence[PathRequest],
    load_weight: float,
    factors: Mapping[str, float],
) -> tuple[dict[str, PathPlan], set[str]]:
    plans: dict[str, PathPlan] = {}
    refused: set[str] = set()
    for request in order:

        def cost_factor(pipe: NetworkPipe, request: PathRequest = request) -> float:
            free = max(bookings.free_kbps(pipe.name, request.start_s, request.end_s, "training"), 0)
            return factors[pipe.name] * (1 + load_weight * (1 - free / max(pipe.capacity_kbps, 1)))

        found = plan_path(network, bookings, request, cost_factor=cost_factor)
        if isinstance(found, PathRefusal):
            refused.add(request.name)
        else:
            plans[request.name] = found
            bookings.book(("batch", request.name), found.spans, found.service)
    for name in plans:
        bookings.release(("batch", name))
    return plans, refused


def _next_order(
    order: Sequence[PathRequest], refused: set[str], values: dict[str, float], rng: Random
) -> list[PathRequest]:
    """Return the order with each refused request some places nearer to the front; small ones move less often."""
    most = max(values.values())
    places: dict[str, float] = {}
    for place, request in enumerate(order):
        forward = rng.uniform(0, len(order)) * values[request.name] / most if request.name in refused else 0.0
        places[request.name] = place - forward + rng.uniform(-1.5, 1.5)
    return sorted(order, key=lambda one: places[one.name])
