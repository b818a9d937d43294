"""What orders do at a simulated site. Repeated, they change nothing; late, they take nothing back."""

from __future__ import annotations

from isthmus.control.simulation.site_parts import Act, PartKey, SitePart
from isthmus.control.simulation.site_preemption import ask, claim_for_pool, evict_victims, withdraw
from isthmus.control.simulation.site_queue import place_pool
from isthmus.control.simulation.site_state import SiteBooks, fail, move, release
from isthmus.core.messages import AgentOrders, PartOrder
from isthmus.core.plan import Part, Plan


def obey(books: SiteBooks, orders: AgentOrders, now_s: float) -> None:
    """Carry out orders, releases first; those under a lower fence than one seen are dropped."""
    if orders.fence < books.fence:
        return
    books.fence = orders.fence
    named = {(order.job, order.attempt) for order in orders.parts}
    for part in [part for part in books.parts.values() if not part.local and part.key not in named]:
        release(books, part, now_s)
        if part.state == "released":
            move(books, part, "forgotten", now_s)
    for order in sorted(orders.parts, key=lambda order: order.desired != "released"):
        _obey_one(books, order, now_s)
    place_pool(books, orders.queue)


def _obey_one(books: SiteBooks, order: PartOrder, now_s: float) -> None:
    part = books.parts.get((order.job, order.attempt))
    if part is None:
        part = SitePart(job=order.job, attempt=order.attempt)
        books.arrive(part)
    part.level = books.cluster.priorities.level(order.priority)
    if order.desired == "released":
        if part.state == "new":
            move(books, part, "released", now_s)
        release(books, part, now_s)
    else:
        _advance(books, part, order, now_s)
    if part.state == "running":
        ranks = order.rank_map
        if ranks is not None and ranks is not part.rank_map and ranks != part.rank_map:
            part.rank_map = ranks
            books.acts.append(Act("ranks", part))
        if order.protect:
            ask(books, part)
        else:
            withdraw(part)


def _advance(books: SiteBooks, part: SitePart, order: PartOrder, now_s: float) -> None:
    """Take a part that does not run yet nearer to what is desired of it."""
    if part.state in ("new", "queued"):
        if order.desired == "running":
            part.chips = {}
            fail(books, part, "own", now_s, "ordered to run, but nothing is held here")
        elif order.desired == "queued":
            _enqueue(books, part, order, now_s)
        else:
            _hold(books, part, order, now_s)
    elif part.state == "ready" and order.desired in ("ready", "prepared"):
        _hold(books, part, order, now_s)
    elif part.state == "evicting" and order.desired in ("ready", "prepared"):
        part.lease_s, part.since_s = order.lease_s, now_s
    elif part.state == "prepared":
        part.lease_s, part.since_s = order.lease_s, now_s
        if order.desired == "running":
            move(books, part, "running", now_s)


def _enqueue(books: SiteBooks, part: SitePart, order: PartOrder, now_s: float) -> None:
    """Queue a part; what the owner never lets the pool have is refused at once."""
    if part.state == "queued":
        return
    if order.plan is not None:
        _cut(books, part, order.plan)
    why = books.policy.objection(order.user, order.spec) if order.spec else ""
    if any(num > books.limit(group) for group, num in part.chips.items()):
        why = "more cards than the owner lets the pool have"
    if why:
        move(books, part, "refused", now_s, f"{books.cluster.name}: {why}")
    else:
        move(books, part, "queued", now_s)


def _hold(books: SiteBooks, part: SitePart, order: PartOrder, now_s: float) -> None:
    """Claim the part's cards; where they are to be held, evict for it whom the order names."""
    victims: tuple[PartKey, ...] = tuple((victim.job, victim.attempt) for victim in order.victims)
    part.lease_s = order.lease_s
    if (part.state, order.desired, part.victims) == ("ready", "ready", victims):
        part.since_s = now_s
        return
    taken = _lacks(books, part, order) or claim_for_pool(books, part, victims)
    if isinstance(taken, str):
        move(books, part, "refused", now_s, taken)
        return
    part.victims = victims
    if part.state == "ready":
        books.cards.give(part, taken)
        if order.desired == "ready":
            part.since_s = now_s
            return
    elif taken or order.desired == "ready":
        move(books, part, "ready" if order.desired == "ready" else "evicting", now_s)
        books.cards.give(part, taken)
    if order.desired == "prepared":
        evict_victims(books, part, now_s)
        if not books.cards.occupants(part):
            move(books, part, "prepared", now_s)
        elif part.state != "evicting":
            move(books, part, "evicting", now_s)


def _lacks(books: SiteBooks, part: SitePart, order: PartOrder) -> str:
    """Give `part` the ranks that the order's plan has here, or return what is missing."""
    if order.plan is None or order.spec is None:
        return "the order to prepare came without its job or plan"
    why = books.policy.objection(order.user, order.spec)
    if why:
        return f"{books.cluster.name}: {why}"
    if part.plan != order.plan or not part.chips:
        _cut(books, part, order.plan)
    return "" if part.chips else f"the plan has no stage at {books.cluster.name}"


def _cut(books: SiteBooks, part: SitePart, plan: Plan) -> None:
    """Take the ranks of this cluster out of a plan."""
    cut = Part.of(plan, books.cluster.name)
    part.plan, part.ranks, part.chips = plan, cut.ranks, dict(cut.chips)
