"""`suggest_changes`: what would give a job without plans one; every suggestion has been planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from isthmus.core.errors import InputError, PlanError
from isthmus.core.job import Job, ParallelDegrees
from isthmus.core.pool import Cluster, NodeGroup, Pool
from isthmus.plan.search.costs.search_limits import SearchLimits
from isthmus.plan.search.costs.slots import eligible_clusters

if TYPE_CHECKING:
    from isthmus.plan.search.search_plans import SearchRequest, SearchResult

MAX_NODES_FACTOR = 64
"""A node group is tried with up to this many times its nodes."""
MAX_GROUPS = 6
"""Node groups that are tried with more nodes, the largest first."""


@dataclass(frozen=True, kw_only=True)
class SuggestedChange:
    """A change after which the job has a plan, with the predicted seconds of a step of the plan that was found."""

    text: str
    iteration_s: float


def suggest_changes(
    request: SearchRequest,
    search: Callable[[SearchRequest], SearchResult],
    should_continue: Callable[[], bool] = lambda: True,
) -> tuple[SuggestedChange, ...]:
    """Return changes of a job or pool that give `request`, which has no plan, one.

    `search` is `search_plans`; it searches each change until a first plan is found and simulated: the optimizer on
    the host, the other precision, smaller micro-batches, limits of the job that are lifted, then the fewest nodes of
    each node group. `should_continue` is called between candidates; False ends with the changes found so far.
    """

    def helpful(changes: Iterator[tuple[str, SearchRequest]]) -> list[SuggestedChange]:
        timed = [(text, _first_plan_s(changed, search, should_continue)) for text, changed in changes]
        return [SuggestedChange(text=text, iteration_s=step_s) for text, step_s in timed if step_s is not None]

    found = helpful(_training_changes(request)) or helpful(_combined_changes(request))
    found += helpful(_lifted_limits(request))
    for cluster, group in _largest_groups(request):
        suggested = _fewest_nodes(request, search, cluster, group, should_continue)
        found += [suggested] if suggested else []
    return tuple(found)


def _first_plan_s(
    request: SearchRequest, search: Callable[[SearchRequest], SearchResult], should_continue: Callable[[], bool]
) -> float | None:
    """Return the simulated step time of the first plan that a search finds, None without one."""
    if not should_continue():
        return None
    quick = replace(
        request, num_plans=1, explain=False, should_continue=lambda _, best: best is None and should_continue()
    )
    try:
        plans = search(quick).plans
    except (PlanError, InputError):  # the changed request contradicts itself, or the model rejects it
        return None
    predicted = plans[0].predicted if plans else None
    return predicted.iteration_s if predicted else None


def _training_changes(request: SearchRequest) -> Iterator[tuple[str, SearchRequest]]:
    """Yield each single change of the training as text, with the changed request."""
    training = request.job.training
    if not training.optimizer_on_host:
        yield "training.optimizer_on_host: true", _with_training(request, optimizer_on_host=True)
    other = _other_precision(request)
    yield f"training.precision: {other}", _with_training(request, precision=other)
    if training.micro_batch_size > 1:
        yield "training.micro_batch_size: 1", _with_training(request, micro_batch_size=1)


def _combined_changes(request: SearchRequest) -> Iterator[tuple[str, SearchRequest]]:
    """Yield the changes of the training together, for a job that no single one helps."""
    if not request.job.training.optimizer_on_host:
        other = _other_precision(request)
        changed = _with_training(request, optimizer_on_host=True, precision=other)
        yield f"training.optimizer_on_host: true and precision: {other}", changed


def _other_precision(request: SearchRequest) -> str:
    return "fp32" if request.job.training.precision == "bf16" else "bf16"


def _with_training(request: SearchRequest, **changes: object) -> SearchRequest:
    return _with_job(request, training=request.job.training.model_copy(update=changes))


def _lifted_limits(request: SearchRequest) -> Iterator[tuple[str, SearchRequest]]:
    """Yield the request without one of its limits: degrees, chips, owners, deadline, price."""
    job, placement = request.job, request.job.placement
    free = SearchLimits(executable=request.limits.executable)
    if request.limits != free or job.parallel != ParallelDegrees():
        unbound = _with_job(replace(request, limits=free), parallel=ParallelDegrees())
        yield "no fixed degrees, micro-batch size or schedule", unbound
    lifted = {"several_owners": True, "mixed_chips": True, "max_chips": None, "clusters": (), "owners": (), "chips": ()}
    for name, value in lifted.items():
        if getattr(placement, name) != value:
            changed = _with_job(request, placement=placement.model_copy(update={name: value}))
            yield f"placement.{name}: true" if value is True else f"no placement.{name}", changed
    if request.deadline_s is not None or request.budget is not None:
        yield "no deadline and no budget", replace(request, deadline_s=None, budget=None)


def _with_job(request: SearchRequest, **changes: object) -> SearchRequest:
    job: Job = request.job.model_copy(update=changes)
    return replace(request, job=job)


def _largest_groups(request: SearchRequest) -> list[tuple[Cluster, NodeGroup]]:
    """Return the node groups that the job may use, those with most memory first; none if chips are not all free."""
    if request.free_chips is not None:
        return []
    placement, pool = request.job.placement, request.pool
    found = [
        (cluster, group)
        for cluster in eligible_clusters(pool, placement)
        for group in cluster.node_groups
        if not placement.chips or group.chip in placement.chips
    ]
    found.sort(key=lambda one: -one[1].num_chips * pool.chip(one[1]).memory_bytes)
    return found[:MAX_GROUPS]


def _fewest_nodes(
    request: SearchRequest,
    search: Callable[[SearchRequest], SearchResult],
    cluster: Cluster,
    group: NodeGroup,
    should_continue: Callable[[], bool],
) -> SuggestedChange | None:
    """Return the least number of nodes of a group with which a plan is found, by doubling and halving."""

    def step_s_with(nodes: int) -> float | None:
        pool = _with_nodes(request.pool, cluster.name, group.name, nodes)
        return _first_plan_s(replace(request, pool=pool), search, should_continue)

    few, many, best_s = group.nodes, group.nodes, None
    while best_s is None and many < group.nodes * MAX_NODES_FACTOR:
        few, many = many, many * 2
        best_s = step_s_with(many)
    while best_s is not None and many - few > 1:
        middle = (few + many) // 2
        middle_s = step_s_with(middle)
        few, many, best_s = (few, middle, middle_s) if middle_s is not None else (middle, many, best_s)
    if best_s is None:
        return None
    chips = many * group.chips_per_node
    text = f"{many} nodes ({chips} chips) of {group.name} at {cluster.name} instead of {group.nodes}"
    return SuggestedChange(text=text, iteration_s=best_s)


def _with_nodes(pool: Pool, cluster: str, group: str, nodes: int) -> Pool:
    clusters = tuple(
        one
        if one.name != cluster
        else one.model_copy(
            update={
                "node_groups": tuple(
                    each if each.name != group else each.model_copy(update={"nodes": nodes}) for each in one.node_groups
                )
            }
        )
        for one in pool.clusters
    )
    return pool.model_copy(update={"clusters": clusters})
