"""Applies the server's orders. They are idempotent, and a late order undoes nothing."""

from __future__ import annotations

from isthmus.core.messages.agent_messages import AgentOrders, PartOrder
from isthmus.core.plan import PlanPart
from isthmus.site.checkpoint_protection import request_checkpoint, withdraw_checkpoint_request
from isthmus.site.evictions import current_holders, evict_victims
from isthmus.site.machine_events import FetchFiles, FetchObserved, LogWarning, WriteRankMap
from isthmus.site.moves.propose_moves import count_moves, note_refused
from isthmus.site.part_lifecycle import fail_part, move_part, release_part
from isthmus.site.parts import SitePart, SiteWorker
from isthmus.site.pool_claims import claim_for_pool
from isthmus.site.scheduler.network_paths import ask_for_path
from isthmus.site.scheduler.scheduler_holds import ask_for_hold, ask_for_probe, drop_hold, take_held_devices
from isthmus.site.site_queue import set_pool_order
from isthmus.site.site_state import SiteState


def apply_orders(site: SiteState, orders: AgentOrders, now_s: float) -> None:
    """Apply the server's orders; releases first, so that freed devices serve the same orders.

    Orders with a lower fence than one seen before come from a deposed leader and are dropped.
    """
    if orders.fence < site.fence:
        if orders.fence != site.rejected_fence:
            site.rejected_fence = orders.fence
            text = f"dropped orders with fence {orders.fence}: orders with fence {site.fence} were seen before"
            site.instructions.append(LogWarning(text=text))
        return
    site.fence = orders.fence
    named = {(order.job, order.attempt) for order in orders.parts}
    for part in [part for part in site.parts.values() if not part.local and part.key not in named]:
        release_part(site, part, now_s)
        if part.state == "released":
            move_part(site, part, "forgotten", now_s)
    for order in sorted(orders.parts, key=lambda order: order.desired != "released"):
        _apply_order(site, order, now_s)
    set_pool_order(site, orders.queue)


def observe_fetch(site: SiteState, observed: FetchObserved) -> None:
    """Record the copying of a job's files; refuse the part if it has failed."""
    for part in list(site.parts.values()):
        if part.job == observed.job and part.fetching:
            part.detail, part.fetching = observed.progress_text, not (observed.complete or observed.failed)
            site.mark_changed(part)
            if observed.failed and part.state == "evicting":
                move_part(site, part, "refused", observed.now_s, f"{site.cluster}: {observed.progress_text}")


def _apply_order(site: SiteState, order: PartOrder, now_s: float) -> None:
    part = site.parts.get((order.job, order.attempt))
    is_placed = part is not None and part.state not in ("new", "queued", "ready")
    if not site.knows_inventory and not is_placed and order.desired in ("queued", "ready", "prepared"):
        return  # the server repeats its orders; nothing can be placed, and nothing refused, before the first look
    if part is None:
        part = SitePart(job=order.job, attempt=order.attempt)
        site.add(part)
    part.level = site.priorities.level(order.priority)
    if order.desired == "released":
        if part.state == "new":
            move_part(site, part, "released", now_s)
        release_part(site, part, now_s)
    elif part.state == "new" and site.shutting_down:
        move_part(site, part, "refused", now_s, f"the agent of {site.cluster} is being stopped")
    elif not site.shutting_down:
        _advance_part(site, part, order, now_s)
    if part.state == "running":
        _deliver_rank_map(site, part, order)
        if order.protect:
            request_checkpoint(site, part)
        else:
            withdraw_checkpoint_request(site, part)


def _advance_part(site: SiteState, part: SitePart, order: PartOrder, now_s: float) -> None:
    """Move a part that does not run yet towards its desired state."""
    if part.state in ("new", "queued"):
        if order.desired == "running":
            part.set_workers({})
            cause = "the lease expired, or the agent's state was lost"
            fail_part(site, part, "own", now_s, f"ordered to run, but it holds no devices here: {cause}")
        elif order.desired == "queued":
            _enqueue(site, part, order, now_s)
        else:
            _claim_devices(site, part, order, now_s)
    elif part.state == "ready" and order.desired in ("ready", "prepared"):
        _claim_devices(site, part, order, now_s)
    elif part.state == "evicting" and order.desired in ("ready", "prepared"):
        part.lease_s, part.since_s = order.lease_s, now_s
        if part.fetching:
            _fetch_files(site, part, order)
    elif part.state == "prepared":
        part.lease_s, part.since_s = order.lease_s, now_s
        if order.desired == "running":
            move_part(site, part, "running", now_s)


def _enqueue(site: SiteState, part: SitePart, order: PartOrder, now_s: float) -> None:
    """Queue a part; refuse it if the owner's policy can never admit it."""
    if part.state == "queued":
        drop_hold(part)
        return
    if order.plan is not None:
        _make_workers(site, part, order)
        part.plan = order.plan
    refusal = _policy_objection(site, order)
    for group, num in part.wanted.items():
        if not refusal and num > site.pool_limit(group):
            wanted = f"{site.cluster}: node group '{group}': {num} devices wanted"
            refusal = f"{wanted}, the owner lets the pool have {site.pool_limit(group)}"
    move_part(site, part, "refused" if refusal else "queued", now_s, refusal)


def _claim_devices(site: SiteState, part: SitePart, order: PartOrder, now_s: float) -> None:
    """Claim the part's devices; for `prepared`, evict the victims named by the order and fetch files."""
    victims = tuple((victim.job, victim.attempt) for victim in order.victims)
    part.lease_s = order.lease_s
    if (part.state, order.desired, part.victims) == ("ready", "ready", victims):
        part.since_s = now_s
        return
    part.probe = part.probe if part.victims == victims else ""
    refusal = _adopt_plan(site, part, order) or claim_for_pool(site, part, victims)
    if not refusal and order.desired == "ready" and not _is_obtainable(site, part):
        for worker in part.workers.values():
            worker.devices = ()
        if part.state != "queued":
            move_part(site, part, "queued", now_s)
        return
    if refusal:
        if part.workers and not victims:
            note_refused(site, part, now_s)
        part.set_workers({})
        drop_hold(part)
        move_part(site, part, "refused", now_s, refusal)
    elif order.desired == "prepared":
        count_moves(site, part, now_s)
        evict_victims(site, part, now_s)
        part.fetching = _fetch_files(site, part, order)
        held = ask_for_hold(site, part, commits=True)
        take_held_devices(site, part)
        has_path = ask_for_path(site, part)
        waits = part.fetching or not held or not has_path or bool(current_holders(site, part))
        move_part(site, part, "evicting" if waits else "prepared", now_s)
    elif part.state == "ready":
        part.since_s = now_s
    else:
        take_held_devices(site, part)
        move_part(site, part, "ready", now_s)


def _is_obtainable(site: SiteState, part: SitePart) -> bool:
    """Return whether the site's scheduler holds the part's devices, or would preempt its victims for them."""
    return ask_for_probe(site, part) if part.victims else ask_for_hold(site, part, commits=False)


def _fetch_files(site: SiteState, part: SitePart, order: PartOrder) -> bool:
    """Start copying the files of the part's job if this site neither shares nor has them; return whether.

    Checkpoints are among them only if neither a site of the plan nor an object store has any: workers fetch those.
    """
    if not site.has_own_storage or not order.files_at or site.cluster in order.files_at:
        return False
    stored = part.spec is not None and part.spec.checkpoints.copy_store is not None
    has_checkpoints = stored or (part.plan is not None and bool(set(part.plan.clusters) & set(order.files_at)))
    site.instructions.append(FetchFiles(part=part, clusters=order.files_at, with_checkpoints=not has_checkpoints))
    return True


def _adopt_plan(site: SiteState, part: SitePart, order: PartOrder) -> str:
    """Give `part` its job, plan and workers; return "" or why the order cannot be applied."""
    if order.plan is None or order.spec is None:
        return "the order has no job or no plan"
    objection = _policy_objection(site, order)
    if objection:
        return objection
    if part.plan != order.plan or not part.workers:
        _make_workers(site, part, order)
    part.user, part.spec, part.plan, part.links = order.user, order.spec, order.plan, order.links
    part.switches = order.switches
    part.has_trained = bool(order.files_at)
    return "" if part.workers else f"the plan has no stage at {site.cluster}"


def _policy_objection(site: SiteState, order: PartOrder) -> str:
    """Return why the owner's policy rejects the job, or the site cannot start its part, or ""; devices aside."""
    objection = site.policy.rejection_reason(order.user, order.spec) if order.spec else ""
    objection = objection or site.objections.get((order.job, order.attempt), "")
    return f"{site.cluster}: {objection}" if objection else ""


def _make_workers(site: SiteState, part: SitePart, order: PartOrder) -> None:
    """Create a worker, without devices yet, for each rank that the order's plan has at this cluster."""
    if order.plan is not None:
        plan, workers = order.plan, dict[int, SiteWorker]()
        for rank in PlanPart.from_plan(plan, site.cluster).ranks:
            workers[rank] = SiteWorker(node_group=plan.stage_of(rank).node_group, chips=plan.chips_of(rank))
        part.set_workers(workers)


def _deliver_rank_map(site: SiteState, part: SitePart, order: PartOrder) -> None:
    if order.rank_map is None or order.rank_map is part.rank_map or order.rank_map == part.rank_map:
        return
    part.rank_map = order.rank_map
    site.update_indexes(part)
    site.instructions.append(WriteRankMap(part=part, rank_map=order.rank_map))
