"""Applies the server's orders. They are idempotent, and a late order undoes nothing."""

from __future__ import annotations

from isthmus.core.messages.agent_messages import AgentOrders, PartOrder
from isthmus.core.plan import Part
from isthmus.site.checkpoint_protection import request_checkpoint, withdraw_request
from isthmus.site.evictions import evict_victims, occupants
from isthmus.site.machine_events import FetchFiles, FetchObserved, LogWarning, WriteRankMap
from isthmus.site.part_lifecycle import fail, move, release
from isthmus.site.parts import SitePart, SiteWorker
from isthmus.site.pool_claims import claim_for_pool
from isthmus.site.site_queue import set_pool_order
from isthmus.site.site_state import SiteState


def apply_orders(site: SiteState, orders: AgentOrders, now_s: float) -> None:
    """Apply the server's orders; releases first, so that freed devices serve the same orders.

    Orders with a lower fence than one seen before come from a deposed leader and are dropped.
    """
    if orders.fence < site.fence:
        if orders.fence != site.rejected_fence:
            site.rejected_fence = orders.fence
            text = (
                f"dropped orders with fence {orders.fence}: orders with fence {site.fence} were seen before"
            )
            site.out.append(LogWarning(text=text))
        return
    site.fence = orders.fence
    named = {(order.job, order.attempt) for order in orders.parts}
    for part in [part for part in site.parts.values() if not part.local and part.key not in named]:
        release(site, part, now_s)
        if part.state == "released":
            move(site, part, "forgotten", now_s)
    for order in sorted(orders.parts, key=lambda order: order.desired != "released"):
        _apply_order(site, order, now_s)
    set_pool_order(site, orders.queue)


def observe_fetch(site: SiteState, seen: FetchObserved) -> None:
    """Record the copying of a job's files; refuse the part if it has failed."""
    for part in list(site.parts.values()):
        if part.job == seen.job and part.fetching:
            part.detail, part.fetching = seen.words, not (seen.here or seen.failed)
            site.update(part)
            if seen.failed and part.state == "evicting":
                move(site, part, "refused", seen.now_s, f"{site.cluster}: {seen.words}")


def _apply_order(site: SiteState, order: PartOrder, now_s: float) -> None:
    part = site.parts.get((order.job, order.attempt))
    if part is None:
        part = SitePart(job=order.job, attempt=order.attempt)
        site.add(part)
    part.level = site.priorities.level(order.priority)
    if order.desired == "released":
        if part.state == "new":
            move(site, part, "released", now_s)
        release(site, part, now_s)
    elif part.state == "new" and site.ending:
        move(site, part, "refused", now_s, f"the agent of {site.cluster} is being stopped")
    elif not site.ending:
        _advance(site, part, order, now_s)
    if part.state == "running":
        _pass_rank_map(site, part, order)
        if order.protect:
            request_checkpoint(site, part)
        else:
            withdraw_request(site, part)


def _advance(site: SiteState, part: SitePart, order: PartOrder, now_s: float) -> None:
    """Move a part that does not run yet towards its desired state."""
    if part.state in ("new", "queued"):
        if order.desired == "running":
            part.set_workers({})
            cause = "the lease expired, or the agent's state was lost"
            fail(site, part, "own", now_s, f"ordered to run, but it holds no devices here: {cause}")
        elif order.desired == "queued":
            _enqueue(site, part, order, now_s)
        else:
            _hold(site, part, order, now_s)
    elif part.state == "ready" and order.desired in ("ready", "prepared"):
        _hold(site, part, order, now_s)
    elif part.state == "evicting" and order.desired in ("ready", "prepared"):
        part.lease_s, part.since_s = order.lease_s, now_s
        if part.fetching:
            _fetch(site, part, order)
    elif part.state == "prepared":
        part.lease_s, part.since_s = order.lease_s, now_s
        if order.desired == "running":
            move(site, part, "running", now_s)


def _enqueue(site: SiteState, part: SitePart, order: PartOrder, now_s: float) -> None:
    """Queue a part; refuse it if the owner's policy can never admit it."""
    if part.state == "queued":
        return
    if order.plan is not None:
        _make_workers(site, part, order)
    refusal = _objection(site, order)
    for group, num in part.wanted.items():
        if not refusal and num > site.limit(group):
            wanted = f"{site.cluster}: node group '{group}': {num} devices wanted"
            refusal = f"{wanted}, the owner lets the pool have {site.limit(group)}"
    move(site, part, "refused" if refusal else "queued", now_s, refusal)


def _hold(site: SiteState, part: SitePart, order: PartOrder, now_s: float) -> None:
    """Claim the part's devices; for `prepared`, evict the victims named by the order and fetch files."""
    victims = tuple((victim.job, victim.attempt) for victim in order.victims)
    part.lease_s = order.lease_s
    if (part.state, order.desired, part.victims) == ("ready", "ready", victims):
        part.since_s = now_s
        return
    refusal = _take_plan(site, part, order) or claim_for_pool(site, part, victims)
    if refusal:
        part.set_workers({})
        move(site, part, "refused", now_s, refusal)
    elif order.desired == "prepared":
        evict_victims(site, part, now_s)
        part.fetching = _fetch(site, part, order)
        move(site, part, "evicting" if part.fetching or occupants(site, part) else "prepared", now_s)
    elif part.state == "ready":
        part.since_s = now_s
    else:
        move(site, part, "ready", now_s)


def _fetch(site: SiteState, part: SitePart, order: PartOrder) -> bool:
    """Start copying the files of the part's job if this site does not share them; return whether."""
    clusters = tuple(cluster for cluster in order.files_at if cluster != site.cluster)
    if not site.fetches or not clusters:
        return False
    site.out.append(FetchFiles(part=part, clusters=clusters))
    return True


def _take_plan(site: SiteState, part: SitePart, order: PartOrder) -> str:
    """Give `part` its job, plan and workers; return "" or why the order cannot be applied."""
    if order.plan is None or order.spec is None:
        return "the order has no job or no plan"
    objection = _objection(site, order)
    if objection:
        return objection
    if part.plan != order.plan or not part.workers:
        _make_workers(site, part, order)
    part.spec, part.plan = order.spec, order.plan
    return "" if part.workers else f"the plan has no stage at {site.cluster}"


def _objection(site: SiteState, order: PartOrder) -> str:
    """Return why the owner's policy rejects the job, independent of devices, or ""."""
    objection = site.policy.objection(order.user, order.spec) if order.spec else ""
    return f"{site.cluster}: {objection}" if objection else ""


def _make_workers(site: SiteState, part: SitePart, order: PartOrder) -> None:
    """Create a worker, without devices yet, for each rank that the order's plan has at this cluster."""
    if order.plan is not None:
        plan, workers = order.plan, dict[int, SiteWorker]()
        for rank in Part.of(plan, site.cluster).ranks:
            stage, num_sharing = plan.stage_of(rank), len(plan.ranks_of(plan.ranks[rank].stage))
            chips = stage.num_chips // num_sharing
            workers[rank] = SiteWorker(node_group=stage.node_group, chips=chips)
        part.set_workers(workers)


def _pass_rank_map(site: SiteState, part: SitePart, order: PartOrder) -> None:
    if order.rank_map is None or order.rank_map is part.rank_map or order.rank_map == part.rank_map:
        return
    part.rank_map = order.rank_map
    site.reindex(part)
    site.out.append(WriteRankMap(part=part, rank_map=order.rank_map))
