"""Rules of a look at the scheduler: nodes, cards, jobs of others."""

from __future__ import annotations

from isthmus.agent.adapters.rules.rule_context import RuleContext, require_rule


def each_card_is_listed_once(site: RuleContext) -> None:
    """The inventory has cards, and each once."""
    cards = [card for node in site.adapter().observe().nodes for card in node.cards]
    require_rule(len(cards) > 0, "the inventory has at least one card")
    require_rule(len(cards) == len(set(cards)), "the inventory lists each card once")


def cards_are_named_by_group_and_node(site: RuleContext) -> None:
    """A card's id is `GROUP/NODE/CARD`, and cards of one node are adjacent."""
    observed = site.adapter().observe()
    for group, cards in observed.cards().items():
        require_rule(all(card.count("/") == 2 and card.startswith(f"{group}/") for card in cards), "GROUP/NODE/CARD")
        nodes = [card.rpartition("/")[0] for card in cards]
        require_rule(nodes == sorted(nodes, key=nodes.index), "cards of one node are adjacent")


def all_adapters_see_the_same_cards(site: RuleContext) -> None:
    """Two adapters of a site, and two looks of one, list the same cards in the same order."""
    first, second = site.adapter(), site.adapter()
    require_rule(first.observe().nodes == second.observe().nodes, "all adapters list the same nodes")
    require_rule(first.observe().nodes == first.observe().nodes, "nodes change only when the site changes")


def epoch_stays_while_the_scheduler_runs(site: RuleContext) -> None:
    """The run of the scheduler has one name."""
    epochs = {adapter.observe().epoch for adapter in (site.adapter(), site.adapter()) for _ in range(2)}
    require_rule(len(epochs) == 1, "an epoch has one name")


def jobs_of_others_have_one_name_each(site: RuleContext) -> None:
    """A job of another user appears once, with more than no card or none yet."""
    jobs = site.adapter().observe().foreign
    require_rule(len({job.name for job in jobs}) == len(jobs), "a job of others appears once")
    require_rule(all(job.running or not job.cards for job in jobs), "a waiting job has no cards")


def own_workers_are_no_foreign_jobs(site: RuleContext) -> None:
    """What this agent holds and runs is not reported as a job of others."""
    adapter = site.adapter("while :; do sleep 0.02; done")
    before = {job.name for job in adapter.observe().foreign}
    rank = site.start(adapter)
    site.wait_started()
    observed = site.adapter().observe()
    require_rule({job.name for job in observed.foreign} <= before, "own work is not the work of others")
    taken = {card for job in observed.foreign for card in job.cards}
    require_rule(not taken & set(rank.cards), "own cards are not taken by others")
    adapter.stop(site.folder, force=True)
    site.wait_exited(adapter)
