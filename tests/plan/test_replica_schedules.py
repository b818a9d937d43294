"""The schedule of each replica: what a search and a warm-up are given, by hand, and which replicas share one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus.core.errors import PlanError
from isthmus.core.plan import Plan, StageTime
from isthmus.plan.time.replica_schedules import (
    first_equal_replicas,
    pipeline_costs,
    replica_schedule,
    with_searched_orders,
)
from isthmus.plan.time.stage_costs import StageCost
from isthmus.schedule import Hop, StageCosts, make_schedule
from isthmus.sim import Interference, SimulatedLink, StageLoad, best_warm_up
from tests.plan.hand import plan_of
from tests.plan.test_stage_loads import costs

LINKS = {
    (a, b): SimulatedLink(
        name=f"{a}>{b}", bytes_per_s=rate, delay_s=rate / 100, jitter_s=1.0, interference=Interference(bytes_per_s=1.0)
    )
    for rate, (a, b) in enumerate([("a", "b"), ("b", "a"), ("b", "c"), ("c", "b"), ("c", "a"), ("a", "c")], 2)
}
SLOW = {ends: replace(link, delay_s=10 * link.bytes_per_s) for ends, link in LINKS.items()}
"""Links of 2 bytes a second from a to b, 3 back, then 4 to 7.

Each has a hundredth of that as seconds of delay, in `SLOW` ten times it.
"""


def costs_of(clusters: str, max_in_flight: int = 3, num_reducing: int = 1, **fields: object) -> tuple[StageCost, ...]:
    """Stages of 2 s forward and 6 s backward whose messages have 10, 20, ... bytes and take 0.1, 0.2, ... s nearby."""
    (plain, *_) = costs(plan_of(clusters="a"))
    place = replace(plain.reducing[0], count=num_reducing)
    return tuple(
        replace(
            plain,
            max_in_flight=max_in_flight,
            reducing=(place,),
            load=StageLoad(
                cluster=name,
                forward_s=2.0,
                backward_s=6.0,
                boundary_bytes=10.0 * number,
                hop_s=number / 10,
                update_s=4.0,
                gradient_bytes=120.0,
                local_bytes_per_s=8.0,
                **fields,
            ),
        )
        for number, name in enumerate(clusters, 1)
    )


def hops(plan: Plan, clusters: str) -> dict[tuple[int, int], Hop]:
    """The hops of the search of replica 0."""
    return dict(pipeline_costs(plan, costs_of(clusters), LINKS, 0).hops)


def far(num_bytes: float, a: str, b: str) -> Hop:
    """A message over the link from a to b."""
    return Hop(delay_s=LINKS[a, b].delay_s, transfer_s=num_bytes / LINKS[a, b].bytes_per_s)


def test_a_search_takes_delay_and_bytes_of_each_hop_both_ways() -> None:
    """The message of the earlier stage, and its gradient back; between stages of one cluster the time of that stage."""
    assert hops(plan_of(clusters="abb", layers=9), "abb") == {
        (0, 1): far(10, "a", "b"), (1, 0): far(10, "b", "a"), (1, 2): Hop(delay_s=0.2), (2, 1): Hop(delay_s=0.2)
    }  # fmt: skip


def test_replicas_share_a_link_that_they_use() -> None:
    """Three of them, and both ways of a pipeline that returns: as many times the bytes."""
    assert hops(plan_of(clusters="ab", dp=3), "ab") == {(0, 1): far(30, "a", "b"), (1, 0): far(30, "b", "a")}
    there_and_back = hops(plan_of(clusters="aba", layers=9), "aba")
    assert there_and_back[0, 1] == far(20, "a", "b")
    assert there_and_back[2, 1] == far(40, "a", "b")
    assert hops(plan_of(clusters="abab"), "abab")[0, 1] == far(20, "a", "b"), "a replica counts once for a direction"


def test_chunks_return_from_the_last_stage_to_the_first() -> None:
    """With at least two, over three stages or more; a pipeline of two returns over its only hop."""
    chunked = {"schedule": "searched", "chunks": 2, "layers": 12}
    closed = hops(plan_of(clusters="abc", **chunked), "abc")
    assert closed[2, 0] == far(30, "c", "a")
    assert closed[0, 2] == far(30, "a", "c")
    assert set(closed) - {(2, 0), (0, 2)} == set(hops(plan_of(clusters="abc", layers=12), "abc"))
    assert (2, 0) not in hops(plan_of(clusters="abc", **(chunked | {"chunks": 1})), "abc")
    assert set(hops(plan_of(clusters="ab", **chunked), "ab")) == {(0, 1), (1, 0)}
    with pytest.raises(PlanError, match=r"^no link from c to a \(add the link to the pool, or remove `chunks`\)"):
        pipeline_costs(
            plan_of(clusters="abc", **chunked), costs_of("abc"),
            {ends: link for ends, link in LINKS.items() if ends != ("c", "a")}, 0,
        )  # fmt: skip


def test_a_search_takes_the_passes_and_the_end_of_a_step() -> None:
    """A quarter of 6 s are weight gradients; 2 (3 - 1) / 3 of 120 bytes at 8 a second after an update of 4 s."""
    found = pipeline_costs(plan_of(), costs_of("ab", num_reducing=3, weight_gradient_share=0.25), LINKS, 0).stages
    assert found[0] == StageCosts(
        forward_s=2.0, backward_input_s=4.5, backward_weight_s=1.5, max_in_flight=3, splits_backward=True,
        tail_s=4 + 4 / 3 * 120 / 8,
    )  # fmt: skip
    whole = pipeline_costs(plan_of(), costs_of("ab", weight_gradient_share=0.0), LINKS, 0).stages[0]
    assert (whole.backward_input_s, whole.splits_backward, whole.tail_s) == (6.0, False, 4.0)


@pytest.mark.parametrize(
    ("fit", "micro_batches", "limits"), [(1, 8, [3, 2, 1]), (5, 8, [5, 5, 5]), (9, 4, [4, 4, 4]), (9, 2, [3, 2, 2])]
)
def test_1f1b_fits_whatever_memory_says(fit: int, micro_batches: int, limits: list[int]) -> None:
    """As many in flight as stages follow; more as far as they fit, at most all."""
    plan = plan_of(clusters="aaa", layers=9, micro_batches=micro_batches)
    found = pipeline_costs(plan, costs_of("aaa", max_in_flight=fit), LINKS, 0).stages
    assert [one.max_in_flight for one in found] == limits
    uneven = plan_of(clusters="aaa", layers=9, dp=2, micro_batches=8, replica_micro_batches=(8, 4))
    second = pipeline_costs(uneven, costs_of("aaa", max_in_flight=9), LINKS, 1).stages
    assert [one.max_in_flight for one in second] == [4, 4, 4]


@pytest.mark.parametrize(
    ("clusters", "micro_batches", "fit", "limits"),
    [
        ("aab", 8, 5, [5, 5, 5]), ("aab", 8, 1, [3, 2, 1]), ("aab", 4, 9, [4, 4, 4]), ("aab", 2, 9, [2, 2, 2]),
        ("abb", 8, 6, [6, 6, 6]), ("aba", 8, 8, [8, 8, 8]), ("abc", 8, 4, [4, 4, 4]),
    ],
)  # fmt: skip
def test_a_warm_up_is_chosen_with_steady_links_and_what_fits(
    clusters: str, micro_batches: int, fit: int, limits: list[int]
) -> None:
    """Passes, links between clusters without jitter and traffic, the first stage's message, micro-batches, limits."""
    plan = plan_of(clusters=clusters, layers=9, schedule="overlapped", micro_batches=micro_batches)
    steady = {
        (index, other): replace(SLOW[clusters[index], clusters[other]], jitter_s=0.0, interference=None)
        for index in range(3)
        for other in (index - 1, index + 1)
        if 0 <= other < 3 and clusters[index] != clusters[other]
    }
    times = [StageTime(forward_s=2.0, backward_s=6.0)] * 3
    warm_up, _ = best_warm_up(times, steady, 10.0, micro_batches, limits)
    made = replica_schedule(plan, costs_of(clusters, max_in_flight=fit), SLOW, 0)
    assert made == make_schedule("overlapped", 3, micro_batches, warm_up=warm_up)


def test_a_plan_that_names_its_warm_up_keeps_it() -> None:
    """No other is looked for."""
    own = plan_of(clusters="aab", layers=9, schedule="overlapped", micro_batches=5, warm_up=(2, 2, 1))
    assert replica_schedule(own, costs_of("aab"), {}, 0) == make_schedule("overlapped", 3, 5, warm_up=(2, 2, 1))


def test_a_named_schedule_has_the_replica_s_micro_batches_and_the_plan_s_chunks() -> None:
    """Also where replicas differ; an unknown name is refused."""
    plan = plan_of(clusters="aa", dp=2, replica_micro_batches=(8, 6))
    assert replica_schedule(plan, costs_of("aa"), {}, 1) == make_schedule("1f1b", 2, 6)
    chunked = plan_of(clusters="aa", schedule="interleaved", chunks=4, micro_batches=4)
    assert replica_schedule(chunked, costs_of("aa"), {}, 0) == make_schedule("interleaved", 2, 4, num_chunks=4)
    with pytest.raises(PlanError, match="unknown schedule 'nosuch'"):
        replica_schedule(plan_of(schedule="nosuch"), costs_of("aa"), {}, 0)


def test_a_searched_schedule_keeps_the_plan_s_orders_and_chunks() -> None:
    """Orders of a plan are taken as they are; without them a search makes some, of one chunk or as many as asked."""
    plain = plan_of(clusters="aa", schedule="searched", micro_batches=2)
    given = plain.model_copy(update={"orders": with_searched_orders(plain, lambda _replica: costs_of("aa"), {}).orders})
    assert given.orders
    assert replica_schedule(given, costs_of("aa"), {}, 0).num_chunks == 1
    chunked = plan_of(clusters="aa", schedule="searched", chunks=2, micro_batches=2)
    assert replica_schedule(chunked, costs_of("aa"), {}, 0).num_chunks == 2


def test_searched_orders_are_listed_by_the_replicas_that_follow_them() -> None:
    """One list for all where they are equal; costs are asked once for each kind. Other words of a schedule go."""
    asked: list[int] = []

    def costs_for(replica: int) -> tuple[StageCost, ...]:
        asked.append(replica)
        return costs_of("aa")

    plan = plan_of(clusters="aa", dp=3, micro_batches=3, replica_micro_batches=(3, 2, 3), schedule="overlapped",
                   warm_up=(1, 0))  # fmt: skip
    made = with_searched_orders(plan, costs_for, {})
    assert asked == [0, 1]
    assert [one.replicas for one in made.orders] == [(0, 2), (1,)]
    assert (made.schedule, made.warm_up) == ("searched", ())
    equal = with_searched_orders(plan_of(clusters="aa", dp=2, micro_batches=2), costs_for, {})
    assert [one.replicas for one in equal.orders] == [()]
    assert asked[2:] == [0]


def test_replicas_are_equal_by_all_but_their_number() -> None:
    """Stages, micro-batches, and samples of one; whatever the order in which the plan lists them."""
    assert first_equal_replicas(plan_of(clusters="ab")) == (0,)
    assert first_equal_replicas(plan_of(clusters="ab", dp=3)) == (0, 0, 0)
    sizes = plan_of(clusters="ab", dp=3, micro_batch_size=2, replica_micro_batch_sizes=(2, 1, 2))
    assert first_equal_replicas(sizes) == (0, 1, 0)
    numbers = plan_of(clusters="ab", dp=3, replica_micro_batches=(8, 8, 7))
    assert first_equal_replicas(numbers) == (0, 0, 2)
    stages = plan_of(clusters="ab", dp=3).stages
    mixed = [*stages[2:4], stages[0], stages[1].model_copy(update={"tp": 2}), *stages[4:]]
    plan = Plan.model_validate(plan_of(clusters="ab", dp=3).model_dump() | {"stages": mixed})
    assert first_equal_replicas(plan) == (0, 1, 1)
