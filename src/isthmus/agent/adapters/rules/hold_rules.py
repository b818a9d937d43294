"""Rules of holds, for adapters whose scheduler holds cards."""

from __future__ import annotations

import contextlib
import threading
import uuid
from functools import partial
from pathlib import Path

from isthmus.agent.adapters.rules.rule_context import LOOP_FOREVER, RuleContext, require_rule
from isthmus.agent.adapters.scheduler_adapter import Hold, HoldRequest, RankNeed, RankStart, SchedulerAdapter
from isthmus.core.errors import InputError, IsthmusError

_SHORT_LEASE_S = 3.0


def a_hold_names_the_cards_of_each_rank(site: RuleContext) -> None:
    """A granted hold has, in the order of the request, known cards of one node for each rank, and none twice."""
    adapter = site.adapter()
    hold = site.granted(adapter, site.request(2))
    cards = [card for rank in hold.cards for card in rank]
    known = {card for group in adapter.observe().cards().values() for card in group}
    require_rule(len(hold.cards) == 2 and all(len(rank) == 1 for rank in hold.cards), "each rank has its cards")
    require_rule(set(cards) <= known and len(set(cards)) == len(cards), "held cards are cards of the site, each once")


def cards_of_a_rank_share_a_node(site: RuleContext) -> None:
    """A rank with two cards has them on one node."""
    adapter = site.adapter()
    (cards,) = site.granted(adapter, site.request(num_cards=2)).cards
    require_rule(len(cards) == 2, "a rank has as many cards as it needs")
    require_rule(len({card.rpartition("/")[0] for card in cards}) == 1, "the cards of a rank share a node")


def a_hold_spans_nodes(site: RuleContext) -> None:
    """Ranks that fill more than a node are held together, on as many nodes as it takes."""
    adapter = site.adapter()
    nodes = [node for node in adapter.observe().nodes if node.usable]
    num_cards = len(nodes[0].cards)
    hold = site.granted(adapter, site.request(2, num_cards=num_cards))
    places = {card.rpartition("/")[0] for rank in hold.cards for card in rank}
    require_rule(len(places) == 2, "a hold spans nodes")


def a_repeated_hold_is_one(site: RuleContext) -> None:
    """A hold whose reply was lost is asked for again, by this adapter and another: one hold, the same cards."""
    adapter, request = site.adapter(), site.request()
    first = site.granted(adapter, request)
    again = site.adapter().hold(request)
    require_rule(again == first, "a repeated hold is the same hold")
    seen = [hold for hold in adapter.observe().holds if hold.id == request.id]
    require_rule(len(seen) == 1, "a repeated hold is one")


def holds_at_the_same_time_are_one(site: RuleContext) -> None:
    """Two adapters that ask for the same id at the same time get one hold."""
    request = site.request()
    threads = [threading.Thread(target=site.adapter().hold, args=(request,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    adapter = site.adapter()
    (cards,) = site.granted(adapter, request).cards
    observed = adapter.observe()
    taken = sum(len(rank) for hold in observed.holds if hold.id == request.id for rank in hold.cards)
    require_rule(taken == len(cards), "holds of one id at the same time are one")


def two_holds_share_no_card(site: RuleContext) -> None:
    """A card is in one hold."""
    adapter = site.adapter()
    (first,), (second,) = (site.granted(adapter, site.request()).cards for _ in range(2))
    require_rule(not set(first) & set(second), "two holds share no card")


def too_large_a_hold_takes_nothing(site: RuleContext) -> None:
    """A hold of more cards than are free waits, and keeps no card from others meanwhile."""
    adapter = site.adapter()
    num_cards = sum(len(cards) for cards in adapter.observe().cards().values())
    site.granted(adapter, site.request())
    late = adapter.hold(site.request(num_cards))
    require_rule(late.state != "granted" and not late.cards, "a hold is of all its cards or of none")
    site.granted(adapter, site.request())


def a_waiting_hold_is_granted_when_cards_return(site: RuleContext) -> None:
    """A hold that waits for cards gets them once they are released."""
    adapter = site.adapter()
    free = site.num_free(adapter.observe())
    first, second = site.request(free), site.request(free)
    site.granted(adapter, first)
    require_rule(adapter.hold(second).state == "waiting", "a hold without free cards waits")
    adapter.release(first.id)
    site.granted(adapter, second)


def released_cards_are_free(site: RuleContext) -> None:
    """Cards of a released hold serve the next one."""
    adapter = site.adapter()
    free = site.num_free(adapter.observe())
    for _ in range(2):
        request = site.request(free)
        site.granted(adapter, request)
        adapter.release(request.id)
        _wait_gone(site, request)


def a_released_id_holds_nothing_again(site: RuleContext) -> None:
    """A late or repeated `hold` of a released id takes no card."""
    adapter, request = site.adapter(), site.request()
    site.granted(adapter, request)
    adapter.release(request.id)
    for other in (adapter, site.adapter()):
        require_rule(other.hold(request).state == "ended", "a released id is used up")
        require_rule(other.commit(request).state == "ended", "a released id cannot be committed")
    _wait_gone(site, request)


def a_release_may_come_first(site: RuleContext) -> None:
    """A release that overtakes its hold wins."""
    adapter, request = site.adapter(), site.request()
    adapter.release(request.id)
    require_rule(adapter.hold(request).state == "ended", "a release before its hold wins")
    _wait_gone(site, request)


def a_release_may_be_repeated(site: RuleContext) -> None:
    """Releasing twice, or an id that never was, changes nothing."""
    adapter, request = site.adapter(), site.request()
    site.granted(adapter, request)
    for hold_id in (request.id, request.id, uuid.uuid4().hex):
        adapter.release(hold_id)
    _wait_gone(site, request)


def a_waiting_hold_can_be_released(site: RuleContext) -> None:
    """A hold that waits is taken back, and is not granted later."""
    adapter = site.adapter()
    first, second = site.request(site.num_free(adapter.observe())), site.request()
    site.granted(adapter, first)
    adapter.hold(second)
    adapter.release(second.id)
    adapter.release(first.id)
    _wait_gone(site, first)
    require_rule(adapter.hold(second).state == "ended", "a released hold is not granted later")
    _wait_gone(site, second)


def a_new_adapter_finds_the_holds(site: RuleContext) -> None:
    """An adapter made after the hold sees it with the same cards, and can release it."""
    first, request = site.adapter(), site.request()
    hold = site.granted(first, request)
    second = site.adapter()
    require_rule(
        [one.cards for one in second.observe().holds if one.id == request.id] == [hold.cards], "holds are found"
    )
    second.release(request.id)
    _wait_gone(site, request)


def commit_keeps_the_cards(site: RuleContext) -> None:
    """A commit, also a repeated one, leaves the hold with its cards."""
    adapter, request = site.adapter(), site.request()
    hold = site.granted(adapter, request)
    for other in (adapter, adapter, site.adapter()):
        require_rule(other.commit(request) == hold, "commit keeps the cards")


def commit_without_hold_is_a_hold(site: RuleContext) -> None:
    """An agent that lost the reply of `hold` may go on with `commit`."""
    adapter, request = site.adapter(), site.request()
    site.wait("a commit of free cards is granted", lambda: adapter.commit(request).state == "granted")


def a_hold_ends_with_its_lease(site: RuleContext) -> None:
    """Without an agent the cards of a hold are free again after its lease."""
    adapter, request = site.adapter(), site.request(lease_s=_SHORT_LEASE_S)
    site.granted(adapter, request)
    site.wait("a hold ends with its lease", lambda: not _holds(site, request))
    require_rule(adapter.hold(request).state == "ended", "an id whose lease has ended is used up")


def a_renewed_hold_outlives_its_lease(site: RuleContext) -> None:
    """`hold` and `commit` renew the lease."""
    adapter = site.adapter()
    renewed, witness = site.request(lease_s=_SHORT_LEASE_S), site.request(lease_s=_SHORT_LEASE_S)
    for request in (renewed, witness):
        site.granted(adapter, request)

    def witness_ended() -> bool:
        require_rule(adapter.commit(renewed).state == "granted", "a renewed hold outlives its lease")
        return not _holds(site, witness)

    site.wait("a hold without renewal ends", witness_ended)
    require_rule(bool(_holds(site, renewed)), "a renewed hold outlives one that is not")


def a_worker_ends_with_its_hold(site: RuleContext) -> None:
    """Nothing runs on cards that were released."""
    adapter = site.adapter('trap "" TERM; ' + LOOP_FOREVER)
    rank = site.start(adapter)
    site.wait_started()
    adapter.release(rank.hold)
    require_rule(site.wait_exited(adapter).exit_status != 0, "a worker ends with its hold")


def a_worker_ends_with_the_lease(site: RuleContext) -> None:
    """A worker whose agent is gone ends with the lease of its hold, although nothing stops it."""
    adapter, request = site.adapter('trap "" TERM; ' + LOOP_FOREVER), site.request(lease_s=_SHORT_LEASE_S)
    (cards,) = site.granted(adapter, request).cards
    adapter.start(RankStart(folder=site.folder, cards=cards, hold=request.id))
    site.wait_started()
    site.wait_exited(site.adapter())


def the_end_of_a_worker_leaves_the_hold(site: RuleContext) -> None:
    """A worker that ends gives nothing back: the next attempt of a rank starts in the same hold."""
    adapter = site.adapter("exit 3")
    rank = site.start(adapter)
    site.wait_exited(adapter)
    again = RankStart(folder=site.subfolder("again"), cards=rank.cards, hold=rank.hold)
    adapter.start(again)
    require_rule(site.wait_exited(adapter, again.folder).exit_status == 3, "a hold serves several workers in turn")


def no_start_in_a_released_hold(site: RuleContext) -> None:
    """A start that comes after the release runs nothing, or ends at once."""
    adapter = site.adapter(LOOP_FOREVER)
    rank = site.rank(adapter)
    adapter.release(rank.hold)
    _wait_gone(site, rank.hold)
    _start_anyhow(adapter, rank)
    adapter.stop(site.folder, force=True)
    site.wait_exited(adapter)


def ranks_start_on_their_nodes(site: RuleContext) -> None:
    """Ranks of one hold on two nodes run at a time, each with its own cards."""
    adapter = site.adapter('echo "$ISTHMUS_CARDS" > "$1/cards"; ' + LOOP_FOREVER)
    num_cards = len(adapter.observe().nodes[0].cards)
    request = site.request(2, num_cards=num_cards)
    hold = site.granted(adapter, request)
    folders = [site.subfolder(f"rank-{number}") for number in range(2)]
    for folder, cards in zip(folders, hold.cards, strict=True):
        adapter.start(RankStart(folder=folder, cards=cards, hold=request.id))
    for folder, cards in zip(folders, hold.cards, strict=True):
        site.wait_for("cards", folder)
        site.wait("a rank knows its cards", partial(_has_text, folder / "cards", ",".join(cards) + "\n"))
    for folder in folders:
        adapter.stop(folder, force=True)
        site.wait_exited(adapter, folder)


def an_unknown_node_group_is_refused(site: RuleContext) -> None:
    """A request for cards that the site does not have is an error of the request, named."""
    need = RankNeed(node_group="no-such-group", num_cards=1)
    request = HoldRequest(id=uuid.uuid4().hex, job="kit", attempt=1, ranks=(need,), lease_s=60.0)
    try:
        site.adapter().hold(request)
    except InputError as error:
        require_rule("no-such-group" in str(error), "the error names the node group")
    else:
        require_rule(False, "an unknown node group is refused")


def a_probe_changes_nothing(site: RuleContext) -> None:
    """A probe holds no card, and of free cards it says that they are free now."""
    adapter = site.adapter()
    request, before = site.request(), adapter.observe()
    probe = adapter.probe(request)
    after = adapter.observe()
    require_rule((before.holds, before.foreign) == (after.holds, after.foreign), "a probe changes nothing")
    if adapter.capabilities.probes:
        require_rule(probe.start_in_s is not None and probe.start_in_s < 60, "a probe knows that cards are free")
        require_rule(probe.victims == (), "free cards need no victims")


def cancelled_while_it_is_asked_for(site: RuleContext) -> None:
    """A release at the same time as the hold: in either order, no card stays held."""
    adapter, request = site.adapter(), site.request()
    thread = threading.Thread(target=adapter.hold, args=(request,))
    thread.start()
    site.adapter().release(request.id)
    thread.join()
    require_rule(site.adapter().hold(request).state == "ended", "a hold that is released while asked for ends")
    _wait_gone(site, request)


def cancelled_between_commit_and_start(site: RuleContext) -> None:
    """A part that is given up after its commit leaves nothing."""
    adapter, request = site.adapter(), site.request()
    site.granted(adapter, request)
    adapter.commit(request)
    adapter.release(request.id)
    _wait_gone(site, request)


def cancelled_while_starting(site: RuleContext) -> None:
    """A part that is given up while its worker starts leaves neither worker nor hold."""
    adapter = site.adapter(LOOP_FOREVER)
    rank = site.rank(adapter)
    thread = threading.Thread(target=_start_anyhow, args=(adapter, rank))
    thread.start()
    site.adapter().release(rank.hold)
    site.adapter().stop(site.folder, force=True)
    thread.join()
    site.wait_exited(site.adapter())
    _wait_gone(site, rank.hold)


def _has_text(file: Path, text: str) -> bool:
    return file.read_text() == text


def _start_anyhow(adapter: SchedulerAdapter, rank: RankStart) -> None:
    with contextlib.suppress(IsthmusError):  # whether it is refused or ends by itself is the adapter's choice
        adapter.start(rank)


def _holds(site: RuleContext, request: HoldRequest | str) -> tuple[Hold, ...]:
    hold_id = request if isinstance(request, str) else request.id
    return tuple(hold for hold in site.adapter().observe().holds if hold.id == hold_id)


def _wait_gone(site: RuleContext, request: HoldRequest | str) -> None:
    site.wait("a released hold is gone", lambda: not _holds(site, request))
