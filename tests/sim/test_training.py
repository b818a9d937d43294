"""Rules of whole iterations: replicas, folding, gradients, accounting, relabelling, determinism."""

import itertools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.core.errors import InputError, PlanError
from isthmus.schedule import Operation, Schedule, check_schedule, make_schedule, overlapped
from isthmus.sim import Interference, Replica, SimulatedLink, SimulatedTraining, StageLoad, simulate_training
from isthmus.sim.iteration.merge_equal_replicas import merge_equal_replicas

pytestmark = pytest.mark.integration

seconds = st.floats(0.001, 0.1)
PATHS = [("a", "a", "b", "b"), ("a", "b", "b", "c"), ("b", "b", "b", "b"), ("c", "a", "c", "a")]
PAIRS = list(itertools.permutations("abc", 2))


def load(cluster, forward_s=0.01, backward_s=0.02, **more):
    fields = {"boundary_bytes": 1e5, "static_bytes": 1e6, "activation_bytes": 1e4, "gradient_bytes": 1e6}
    return StageLoad(cluster=cluster, forward_s=forward_s, backward_s=backward_s, **{**fields, **more})


def wires(rate=1e8, delay_s=0.005, **more):
    return {(a, b): SimulatedLink(name=f"{a}>{b}", bytes_per_s=rate, delay_s=delay_s, **more) for a, b in PAIRS}


@st.composite
def trainings(draw, sharings=("fifo", "fair")):
    """Up to three classes of replicas of four stages over three clusters, some of them several times."""
    micro_batches = draw(st.integers(8, 12)) // 2 * 2
    replicas = []
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from(["1f1b", "overlapped", "interleaved", "zero_bubble", "dualpipe"]))
        cuts = [0, *sorted(draw(st.sets(st.integers(1, 11), min_size=3, max_size=3))), 12]
        stages = tuple(
            load(cluster, draw(seconds), draw(seconds), layers=(cuts[i], cuts[i + 1]),
                 local_bytes_per_s=1e9, update_s=0.001, hop_s=0.0005)
            for i, cluster in enumerate(draw(st.sampled_from(PATHS)))
        )  # fmt: skip
        schedule = make_schedule(name, 4, micro_batches)
        replicas.append(Replica(stages=stages, schedule=schedule, count=draw(st.integers(1, 3))))
    return SimulatedTraining(
        replicas=tuple(replicas),
        links=wires(draw(st.floats(1e7, 1e9)), draw(st.floats(0, 0.02))),
        sharing=draw(st.sampled_from(sharings)),
        transport=draw(st.sampled_from(["buffered", "rendezvous"])),
        iterations=draw(st.integers(1, 2)),
    )


@pytest.mark.slow
@settings(max_examples=50)
@given(trainings(sharings=("fair",)))
def test_folding_equal_replicas_changes_nothing(training):
    """Fair wires: folded and unfolded runs agree far within the promised 0.1 %, in every figure."""
    folded, apart = simulate_training(training), simulate_training(training, merge_replicas=False)
    assert folded.iteration_s == pytest.approx(apart.iteration_s, rel=1e-6)
    for one, other in zip(folded.stages, apart.stages, strict=True):
        for name, value in one.as_dict().items():
            assert value == pytest.approx(other.as_dict()[name], rel=1e-6, abs=1e-6)
    for one, other in zip(folded.links, apart.links, strict=True):
        assert one.num_bytes == pytest.approx(other.num_bytes, rel=1e-6)


@pytest.mark.parametrize("chips", [64, 128, 256])
def test_folding_holds_up_to_256_chips(chips):
    """Two kinds of replicas across three clusters, four chips a stage: the same iteration, folded or not."""
    kinds = [
        tuple(load(c, f, 2 * f, layers=(i, i + 1)) for i, c in enumerate(path))
        for path, f in ((PATHS[0], 0.01), (PATHS[1], 0.012))
    ]
    schedule = make_schedule("1f1b", 4, 8)
    replicas = tuple(Replica(stages=k, schedule=schedule, count=chips // 32) for k in kinds)
    training = SimulatedTraining(replicas=replicas, links=wires(2e7))
    folded, apart = (simulate_training(training, merge_replicas=fold, details=False) for fold in (True, False))
    assert folded.iteration_s == pytest.approx(apart.iteration_s, rel=1e-3)
    assert folded.num_events < apart.num_events


def test_replicas_fold_only_where_they_stay_in_step():
    """Jitter or first-come-first-served wires keep replicas apart, unless they cross no wire at all."""
    schedule = make_schedule("1f1b", 2, 2)
    inside = Replica(stages=(load("a"), load("a")), schedule=schedule, count=3)
    across = Replica(stages=(load("a"), load("b")), schedule=make_schedule("1f1b", 2, 2), count=2)
    both = (inside, across, across)

    def counts(**more):
        training = SimulatedTraining(replicas=both, **{"links": wires(), "sharing": "fair", **more})
        folded, places = merge_equal_replicas(training)
        return [one.count for one in folded], places

    assert counts() == ([3, 4], (0, 1, 1))
    assert counts(sharing="fifo") == ([3, 1, 1, 1, 1], (0, 1, 3))
    assert counts(links=wires(jitter_s=0.001)) == ([3, 1, 1, 1, 1], (0, 1, 3))


@settings(max_examples=50)
@given(trainings())
def test_the_time_of_a_stage_is_busy_bubble_and_communication(training):
    """The three parts fill the iteration; busy is exactly the work there is."""
    run = simulate_training(training)
    for stage in run.stages:
        parts = (stage.busy_s, stage.bubble_s, stage.exposed_communication_s)
        assert all(part >= -1e-9 for part in parts)
        assert sum(parts) == pytest.approx(run.iteration_s, rel=1e-9)
        replica = training.replicas[stage.replica]
        cost = replica.stages[stage.stage]
        work_s = replica.schedule.num_micro_batches * (cost.forward_s + cost.backward_s) + cost.update_s
        assert stage.busy_s == pytest.approx(work_s, rel=1e-9)


@settings(max_examples=50)
@given(trainings())
def test_the_critical_path_fills_the_run_without_a_gap(training):
    """Its spans follow each other from 0 to the end, so that shortening anything else changes nothing."""
    run = simulate_training(training)
    path = run.critical_path
    assert path[0].start_s == 0
    assert path[-1].end_s == pytest.approx(run.total_s, rel=1e-12)
    assert all(a.end_s == b.start_s for a, b in itertools.pairwise(path))


@pytest.mark.slow
@settings(max_examples=50)
@given(trainings())
def test_memory_peaks_as_the_checker_says(training):
    """Peak memory is static bytes and the checker's peak in flight; it ends where it began."""
    for stage in simulate_training(training).stages:
        replica = training.replicas[stage.replica]
        schedule, cost = replica.schedule, replica.stages[stage.stage]
        each = cost.activation_bytes / (2 if schedule.name == "interleaved" else 1)
        peak = check_schedule(schedule)[stage.stage]
        assert stage.peak_memory_bytes == cost.static_bytes + peak * each
        assert max(held for _, held in stage.memory_over_time) == stage.peak_memory_bytes
        assert stage.memory_over_time[-1][1] == cost.static_bytes


@settings(max_examples=30)
@given(trainings(), st.permutations("xyz"))
def test_relabelling_clusters_changes_nothing(training, letters):
    """Names carry no meaning, not even for the drawing of jitter."""
    name = dict(zip("abc", letters, strict=True))
    jittery = {ends: replace(wire, jitter_s=0.002) for ends, wire in training.links.items()}
    training = replace(training, links=jittery)
    renamed = replace(
        training,
        replicas=tuple(
            replace(r, stages=tuple(replace(s, cluster=name[s.cluster]) for s in r.stages)) for r in training.replicas
        ),
        links={(name[a], name[b]): replace(w, name="?") for (a, b), w in jittery.items()},
    )
    run, same = simulate_training(training), simulate_training(renamed)
    assert run.iteration_s == same.iteration_s
    assert [s.as_dict() for s in run.stages] == [s.as_dict() for s in same.stages]


@given(trainings(), st.integers(0, 5))
@settings(max_examples=20)
def test_the_same_seed_gives_the_same_run(training, seed):
    """A run is a function of its inputs."""
    training = replace(training, links=wires(jitter_s=0.01), seed=seed)
    assert simulate_training(training) == simulate_training(training)


@given(trainings())
@settings(max_examples=30)
def test_links_carry_what_the_schedules_send(training):
    """Bytes of activations and gradients of every crossing, both ways alike; nothing above the rate."""
    run = simulate_training(replace(training, replicas=training.replicas[:1], sharing="fair"))
    replica = training.replicas[0]
    schedule = replica.schedule
    expected = dict.fromkeys(PAIRS, 0.0)
    for m in range(schedule.num_micro_batches):
        places = [replica.stages[stage].cluster for stage, _ in schedule.route(m)]
        for a, b in itertools.pairwise(places):
            if a != b:
                expected[a, b] += 1e5 * replica.count
                expected[b, a] += 1e5 * replica.count
    for link in run.links:
        assert link.num_bytes == pytest.approx(expected[link.source, link.target])
        assert 0 <= link.utilisation <= 1 + 1e-9


def test_an_all_reduce_by_hand():
    """Two replicas in two clusters, 1 MB of gradients: 1 MB each way at 10 MB/s, and two delays.

    Ring of two: each direction carries 2 (2 - 1) / 2 of the bytes in two steps.
    """
    schedule = make_schedule("1f1b", 1, 4)
    replicas = tuple(Replica(stages=(load(c),), schedule=schedule) for c in "ab")
    run = simulate_training(SimulatedTraining(replicas=replicas, links=wires(1e7, 0.005)))
    assert run.iteration_s == pytest.approx(4 * 0.03 + 0.1 + 2 * 0.005)
    assert run.stages[0].exposed_communication_s == pytest.approx(0.11)
    assert run.critical_path[-1].kind == "all-reduce"


def test_an_all_reduce_inside_a_cluster_by_hand():
    """Four replicas in one cluster: 2 (4 - 1) / 4 of 1 MB at 10 MB/s, and no wire needed."""
    one = Replica(stages=(load("a", local_bytes_per_s=1e7),), schedule=make_schedule("1f1b", 1, 4), count=4)
    assert simulate_training(SimulatedTraining(replicas=(one,))).iteration_s == pytest.approx(4 * 0.03 + 0.15)


def test_a_slow_replica_makes_the_others_wait_in_a_bubble():
    """Waiting for a straggler's gradients is a bubble, not communication."""
    schedule = make_schedule("1f1b", 1, 4)
    fast = Replica(stages=(load("a"),), schedule=schedule)
    slow = Replica(stages=(load("a", 0.02, 0.04),), schedule=schedule)
    run = simulate_training(SimulatedTraining(replicas=(fast, slow)))
    assert run.stages[0].bubble_s == pytest.approx(0.12)
    assert run.stages[0].exposed_communication_s == 0
    assert [span.replica for span in run.critical_path] == [1] * 8


def test_replicas_cut_differently_reduce_layer_by_layer():
    """A stage waits for every stage of other replicas that shares one of its layers."""
    schedule = make_schedule("1f1b", 2, 2)
    one = Replica(stages=(load("a", layers=(0, 3)), load("a", layers=(3, 4))), schedule=schedule)
    two = Replica(stages=(load("a", layers=(0, 1)), load("a", 0.05, 0.1, layers=(1, 4))), schedule=schedule)
    run = simulate_training(SimulatedTraining(replicas=(one, two)))
    waits = {(s.replica, s.stage) for s in run.spans if s.kind == "bubble" and s.what == "update(0)"}
    assert {(0, 0), (0, 1)} <= waits


def test_one_operation_may_take_longer():
    """`duration_overrides` slows single operations: a straggling micro-batch."""
    slow = load("a", duration_overrides=((Operation("forward", 1), 0.5),))
    run = simulate_training(
        SimulatedTraining(replicas=(Replica(stages=(slow,), schedule=make_schedule("1f1b", 1, 3)),))
    )
    assert run.iteration_s == pytest.approx(0.5 + 2 * 0.01 + 3 * 0.02)


def test_interference_slows_an_iteration_and_its_pauses_help():
    """Traffic of others on the wire costs time; half the time on costs less."""
    replica = Replica(stages=(load("a", boundary_bytes=2e6), load("b")), schedule=make_schedule("1f1b", 2, 8))
    quiet, half, busy = (
        simulate_training(SimulatedTraining(replicas=(replica,), links=wires(interference=other))).iteration_s
        for other in (
            None,
            Interference(bytes_per_s=9e7, on_s=0.05, off_s=0.05),
            Interference(bytes_per_s=9e7),
        )
    )
    assert quiet < half < busy


def test_overlapping_hides_what_blocking_exposes():
    """At 20 ms a hop the overlapped schedule exposes less communication than blocking 1F1B."""
    stages = tuple(load(c) for c in "aabb")
    blocking, hidden = (
        simulate_training(SimulatedTraining(replicas=(Replica(stages=stages, schedule=s),), links=wires(1e9, 0.02)))
        for s in (make_schedule("1f1b", 4, 16), overlapped(4, 16, [8, 6, 2, 0]))
    )
    assert hidden.iteration_s < blocking.iteration_s
    exposed = [sum(s.exposed_communication_s for s in run.stages) for run in (hidden, blocking)]
    assert exposed[0] < exposed[1]


def test_the_answer_has_the_promised_form():
    """`as_dict` is JSON with the agreed names; details only on request."""
    replica = Replica(stages=(load("a"), load("b")), schedule=make_schedule("1f1b", 2, 2))
    run = simulate_training(SimulatedTraining(replicas=(replica,), links=wires()))
    answer = json.loads(json.dumps(run.as_dict()))
    assert set(answer) == {"iteration_s", "stages", "links"}
    stage = {"busy_s", "bubble_s", "exposed_communication_s", "peak_memory_bytes"}
    assert [set(one) for one in answer["stages"]] == [stage] * 2
    assert set(answer["links"][0]) == {"from", "to", "bytes", "utilisation"}
    assert {"critical_path", "spans", "memory"} <= set(json.loads(json.dumps(run.as_dict(details=True))))
    assert simulate_training(SimulatedTraining(replicas=(replica,), links=wires()), details=False).spans == ()


def test_what_cannot_run_is_refused():
    """A missing link, no replica, stages that do not fit the schedule, a schedule that deadlocks."""
    schedule = make_schedule("1f1b", 2, 2)
    replica = Replica(stages=(load("a"), load("b")), schedule=schedule)
    with pytest.raises(InputError, match="no link from a to b"):
        simulate_training(SimulatedTraining(replicas=(replica,)))
    with pytest.raises(InputError):
        simulate_training(SimulatedTraining(replicas=()))
    with pytest.raises(InputError):
        Replica(stages=(load("a"),), schedule=schedule)
    first, last = schedule.stages
    silent = tuple(one for one in first if one.kind != "send_forward")
    with pytest.raises(PlanError, match="deadlocks"):
        simulate_training(
            SimulatedTraining(replicas=(replace(replica, schedule=Schedule("bad", 2, (silent, last))),), links=wires())
        )
