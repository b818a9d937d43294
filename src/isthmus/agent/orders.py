"""What the server's orders do. Repeated, they change nothing; late, they take nothing back."""

from __future__ import annotations

from isthmus.agent.events import Complain, FetchFiles, FilesSeen, WriteRanks
from isthmus.agent.parts import HeldPart, HeldWorker
from isthmus.agent.preemption import claim_for_pool, evict_victims, occupants
from isthmus.agent.protection import ask, withdraw
from isthmus.agent.site import SiteState, fail, move, release
from isthmus.agent.site_queue import place_pool
from isthmus.core.messages import AgentOrders, PartOrder
from isthmus.core.plan import Part


def obey(site: SiteState, orders: AgentOrders, now_s: float) -> None:
    """Carry out what the server orders; release first, so that cards given back serve the same orders.

    Orders under a lower fence than one seen before come from a server that no longer speaks for the pool.
    """
    if orders.fence < site.fence:
        if orders.fence != site.dropped:
            site.dropped = orders.fence
            words = f"orders under fence {orders.fence} are dropped: {site.fence} was seen"
            site.out.append(Complain(text=words))
        return
    site.fence = orders.fence
    named = {(order.job, order.attempt) for order in orders.parts}
    for part in list(site.parts.values()):
        if part.key not in named and not part.local:
            release(site, part, now_s)
            if part.state == "released":
                move(site, part, "forgotten", now_s)
    for order in sorted(orders.parts, key=lambda order: order.desired != "released"):
        _obey_one(site, order, now_s)
    place_pool(site, orders.queue)


def _obey_one(site: SiteState, order: PartOrder, now_s: float) -> None:
    part = site.parts.get((order.job, order.attempt))
    if part is None:
        part = HeldPart(job=order.job, attempt=order.attempt)
        site.arrive(part)
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
        _pass_ranks(site, part, order)
        if order.protect:
            ask(site, part)
        else:
            withdraw(part)


def _advance(site: SiteState, part: HeldPart, order: PartOrder, now_s: float) -> None:
    """Take a part that does not run yet nearer to what is desired of it."""
    if part.state in ("new", "queued"):
        if order.desired == "running":
            why = "ordered to run, but nothing is held here: the lease ended, or the agent's state was lost"
            part.workers = {}
            fail(site, part, "own", now_s, why)
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


def _enqueue(site: SiteState, part: HeldPart, order: PartOrder, now_s: float) -> None:
    """Queue a part; what the owner never lets the pool have is refused at once."""
    if part.state == "queued":
        return
    if order.plan is not None:
        _cut(site, part, order)
    why = _objection(site, order)
    if why:
        move(site, part, "refused", now_s, why)
        return
    limits = ((group, num, site.limit(group)) for group, num in part.wanted.items())
    for group, num, limit in limits:
        if num > limit:
            why = f"node group '{group}': {num} cards wanted, the owner lets the pool have {limit}"
            move(site, part, "refused", now_s, f"{site.cluster}: {why}")
            return
    move(site, part, "queued", now_s)


def _hold(site: SiteState, part: HeldPart, order: PartOrder, now_s: float) -> None:
    """Claim the part's cards; where they are to be held, evict for it whom the order names."""
    victims = tuple((victim.job, victim.attempt) for victim in order.victims)
    part.lease_s = order.lease_s
    if (part.state, order.desired, part.victims) == ("ready", "ready", victims):
        part.since_s = now_s
        return
    why = _lacks(site, part, order) or claim_for_pool(site, part, victims)
    if why:
        part.workers = {}
        move(site, part, "refused", now_s, why)
    elif order.desired == "prepared":
        evict_victims(site, part, now_s)
        part.fetching = _fetch(site, part, order)
        move(site, part, "evicting" if part.fetching or occupants(site, part) else "prepared", now_s)
    elif part.state == "ready":
        part.since_s = now_s
    else:
        move(site, part, "ready", now_s)


def see_files(site: SiteState, seen: FilesSeen) -> None:
    """Take in how far the files of a job are; without them its part is not prepared, but refused."""
    for part in site.parts.values():
        if part.job == seen.job and part.fetching:
            part.detail, part.fetching = seen.words, not (seen.here or seen.failed)
            if seen.failed and part.state == "evicting":
                part.workers = {}
                move(site, part, "refused", seen.now_s, f"{site.cluster}: {seen.words}")


def _fetch(site: SiteState, part: HeldPart, order: PartOrder) -> bool:
    """Have the files of the part's job brought here, where this site does not share them; return whether."""
    clusters = tuple(cluster for cluster in order.files_at if cluster != site.cluster)
    if not site.fetches or not clusters:
        return False
    site.out.append(FetchFiles(part=part, clusters=clusters))
    return True


def _lacks(site: SiteState, part: HeldPart, order: PartOrder) -> str:
    """Give `part` the ranks that the order's plan has here, or return what is missing."""
    if order.plan is None or order.spec is None:
        return "the order to prepare came without its job or plan"
    why = _objection(site, order)
    if why:
        return why
    if part.plan != order.plan or not part.workers:
        _cut(site, part, order)
    part.spec, part.plan = order.spec, order.plan
    return "" if part.workers else f"the plan has no stage at {site.cluster}"


def _objection(site: SiteState, order: PartOrder) -> str:
    """Return what the owner has against the job, whatever cards it needs, or ""."""
    why = site.policy.objection(order.user, order.spec) if order.spec else ""
    return f"{site.cluster}: {why}" if why else ""


def _cut(site: SiteState, part: HeldPart, order: PartOrder) -> None:
    """Take the ranks of this cluster out of the order's plan, without cards yet."""
    if order.plan is not None:
        plan, part.workers = order.plan, {}
        for rank in Part.of(plan, site.cluster).ranks:
            stage, sharing = plan.stage_of(rank), len(plan.ranks_of(plan.ranks[rank].stage))
            chips = stage.num_chips // sharing
            part.workers[rank] = HeldWorker(node_group=stage.node_group, chips=chips)


def _pass_ranks(site: SiteState, part: HeldPart, order: PartOrder) -> None:
    if order.rank_map is not None and order.rank_map != part.rank_map:
        part.rank_map = order.rank_map
        site.out.append(WriteRanks(part=part, rank_map=order.rank_map))
