"""Of which parts a stage's memory consists: each rule is one difference between two stages."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from isthmus.core.errors import PlanError
from isthmus.core.plan import Plan
from isthmus.plan.memory.backward_peak import LayerMemory, MicroBatchLoad, layer_memory, working_bytes
from isthmus.plan.memory.plan_stage_memory import (
    max_in_flight,
    num_reducing_replicas,
    plan_stage_memory,
    stage_degrees,
    weight_element_bytes,
)
from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.memory.stage_memory import StageMemory, combine_copies, stage_memory
from isthmus.plan.profile.component import Sharding
from isthmus.plan.profile.model_profile import profile_model
from isthmus.plan.search.costs.workload import TrainingWorkload
from isthmus.plan.time.calibration import DATA_SHEET
from tests.plan.hand import model_of, plan_of
from tests.plan.published import published

DENSE, TIED = (profile_model(model_of(layers=4, hidden=256, tie_word_embeddings=tied)) for tied in (False, True))
SPARSE = profile_model(published("mixtral-8x7b"))
TOKENS = 128


def stage(profile=DENSE, layers=(0, 4), **options):
    fields = {
        "is_first": True,
        "is_last": True,
        "micro_batch_size": 1,
        "sequence_length": TOKENS,
        "in_flight": 1,
    } | options
    return stage_memory(profile, layers, **fields)


@pytest.mark.parametrize(("precision", "each"), [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("is_last", [True, False])
def test_the_ends_of_a_pipeline_hold_their_tensors_and_send_across_their_boundaries(precision, each, is_first, is_last):
    """Embedding on the first; norm and head on the last; a sent tensor where there is a next stage, a received one in
    bf16; and two message buffers wherever there is a neighbour.
    """
    load = (TOKENS, TOKENS, each)
    middle = stage(precision=precision, is_first=False, is_last=False)
    here = stage(precision=precision, is_first=is_first, is_last=is_last)
    ends = [DENSE.embedding] * is_first + [DENSE.final_norm, DENSE.head] * is_last
    assert here.weights_bytes - middle.weights_bytes == each * sum(part.parameters for part in ends)
    crossing = TOKENS * 256 * each
    received = crossing if precision == "bf16" else 0
    kept = sum(part.activation_bytes(*load) for part in ends) - crossing * is_last - received * is_first
    assert here.activations_bytes - middle.activations_bytes == pytest.approx(kept)


def test_the_rotary_tables_are_kept_once_for_the_positions_of_a_sequence():
    """A larger micro-batch repeats none; context parallelism keeps those of its tokens."""
    width = DENSE.position_width * 2
    assert width > 0
    layers = sum(layer.activation_bytes(TOKENS, TOKENS, 2) for layer in DENSE.layers)
    one = stage(is_first=False, is_last=False).activations_bytes
    assert one == pytest.approx(layers + TOKENS * width + 2 * TOKENS * 256 * 2)
    two = stage(is_first=False, is_last=False, micro_batch_size=2).activations_bytes
    assert two == pytest.approx(2 * one - TOKENS * width)
    halves = stage(is_first=False, is_last=False, cp=2).activations_bytes
    assert halves == pytest.approx(one / 2)


def test_a_tied_head_on_another_stage_is_a_copy():
    """On one stage embedding and head are one weight."""
    table = TIED.embedding.parameters
    assert stage(TIED).weights_bytes == 2 * TIED.num_parameters
    last = stage(TIED, is_first=False)
    assert last.weights_bytes == stage(TIED).weights_bytes
    assert stage(TIED, is_last=False).weights_bytes == 2 * (TIED.num_parameters - 256)
    assert stage(TIED, is_first=False, is_last=False).weights_bytes == 2 * (TIED.num_parameters - 256 - table)
    assert stage(is_first=False).weights_bytes == 2 * (DENSE.num_parameters - DENSE.embedding.parameters)


def test_an_outer_optimizer_adds_eight_bytes_a_parameter():
    """The last averaged parameters and a momentum, in fp32; nothing else changes but the reserve."""
    plain, outer = stage(), stage(outer_optimizer=True)
    assert outer.optimizer_bytes - plain.optimizer_bytes == 8 * DENSE.num_parameters
    assert outer.allocated_bytes - plain.allocated_bytes == 8 * DENSE.num_parameters


@pytest.mark.parametrize(("precision", "each"), [("bf16", 2), ("fp32", 4)])
@pytest.mark.parametrize(("zero", "shards"), [(0, 1), (3, 4)])
def test_a_reference_model_is_a_copy_of_the_weights(precision, each, zero, shards):
    """As wide as compute uses them, and sharded where they are; the search counts the same bytes a parameter."""
    options = {"precision": precision, "zero": zero, "dp": 4}
    plain, with_copy = stage(**options), stage(reference_model=True, **options)
    assert with_copy.weights_bytes - plain.weights_bytes == each * DENSE.num_parameters / shards
    assert with_copy.allocated_bytes - plain.allocated_bytes == each * DENSE.num_parameters / shards
    workload = TrainingWorkload(DENSE, TOKENS, precision, DATA_SHEET)
    of_search = replace(workload, reference_model=True).static_bytes[0] - workload.static_bytes[0]
    assert of_search == each


def test_a_plan_with_a_reference_model_holds_it_in_every_stage():
    """The planner sets it for a job with a penalty."""
    plan = plan_of(layers=4, clusters="ab")
    beside = Plan.model_validate(plan.model_dump() | {"reference_model": True})
    for index in range(2):
        every, some = (plan_stage_memory(one, DENSE, one.stages, index) for one in (plan, beside))
        assert some.weights_bytes > every.weights_bytes


def test_the_update_of_a_short_sequence_holds_two_tensors_of_the_largest_gradient():
    """Where the backward pass needs less. No activations are left then; ZeRO 1 cuts them; none on the host."""
    largest = 4 * 256 * 256
    short = {"sequence_length": 1, "is_first": False, "is_last": False}
    messages = 2 * 256 * 2
    one = stage(**short)
    assert one.buffers_bytes == pytest.approx(8 * largest - one.activations_bytes + messages)
    cut = stage(**short, dp=2, zero=1)
    assert cut.buffers_bytes == pytest.approx(8 * largest / 2 - cut.activations_bytes + messages)
    assert stage(**short, optimizer_on_host=True).buffers_bytes < cut.buffers_bytes


def test_zero_2_holds_the_gradients_of_a_layer_before_they_are_summed():
    """In fp32; the rest is the same as with ZeRO 1."""
    layer = sum(weight.parameters for part in DENSE.layers[0].components for weight in part.weights)
    cut, whole = (stage(zero=zero).buffers_bytes for zero in (2, 1))
    assert cut - whole == 4 * layer


@pytest.mark.parametrize("profile", [DENSE, TIED])
def test_zero_3_gathers_two_neighbours_of_embedding_layers_and_head(profile):
    """In the precision of compute; with a pipeline all of the stage, each weight once."""
    layer = sum(weight.parameters for part in profile.layers[0].components for weight in part.weights)
    table, norm = profile.vocab_size * 256, 256
    for precision, each in (("bf16", 2), ("fp32", 4)):
        gathered, whole = (stage(profile, precision=precision, zero=zero).buffers_bytes for zero in (3, 2))
        assert gathered - whole == each * (layer + max(layer, table + norm))
        first = (stage(profile, precision=precision, zero=zero, is_last=False).buffers_bytes for zero in (3, 2))
        assert next(first) - next(first) == each * (4 * layer + table)


def test_messages_take_two_boundary_tensors():
    """A stage that is the whole pipeline sends none."""
    alone = stage(sequence_length=4096, is_first=True, is_last=True)
    first = stage(sequence_length=4096, is_first=True, is_last=False)
    last = stage(sequence_length=4096, is_first=False, is_last=True)
    boundary = 4096 * 256 * 2
    assert last.buffers_bytes == alone.buffers_bytes + 2 * boundary
    assert first.buffers_bytes < alone.buffers_bytes, "its peak is without logits"


def test_each_micro_batch_in_flight_keeps_its_activations():
    """Only one of them is in its backward pass."""
    one, three = stage(sequence_length=4096), stage(sequence_length=4096, in_flight=3)
    assert three.activations_bytes == 3 * one.activations_bytes
    assert three.buffers_bytes == one.buffers_bytes


def test_the_reserve_is_a_share_of_all_the_rest():
    """4 % where nothing else is said."""
    assert stage().reserve_bytes == pytest.approx(0.04 * stage().allocated_bytes)
    twice = stage(reserve_fraction=0.1)
    assert twice.total_bytes == pytest.approx(1.1 * twice.allocated_bytes)


def test_experts_are_cut_over_the_chips_that_hold_the_same():
    """ZeRO 3 with 4 replicas and 2 groups of experts: every expert is on 2 chips, all else on 4."""
    experts = sum(w.parameters for layer in SPARSE.layers for w in layer.feed_forward.weights if w.expert)
    here = {"layers": (0, SPARSE.num_layers), "ep": 2, "dp": 4}
    whole, cut = stage(SPARSE, **here), stage(SPARSE, **here, zero=3)
    dense = SPARSE.num_parameters - experts
    assert whole.weights_bytes == 2 * (dense + experts / 2)
    assert cut.weights_bytes == 2 * (dense / 4 + experts / 2 / 2)


@pytest.mark.parametrize(
    ("degrees", "same"),
    [({"dp": 4}, 4), ({"dp": 4, "ep": 2}, 2), ({"dp": 2, "cp": 2, "ep": 4}, 1), ({"tp": 4, "dp": 2, "ep": 8}, 1),
     ({"tp": 4, "dp": 2}, 2), ({"ep": 8}, 1)],
)  # fmt: skip
def test_the_chips_that_hold_the_same_experts(degrees, same):
    """All chips of the replicas over the groups; tensor parallelism cuts experts only where they are not dealt out."""
    assert StageDegrees(**degrees).expert_dp == same


def test_only_the_first_layers_of_a_stage_are_recomputed():
    """As many as are asked for, counted from its own first; `(0, 4)` is a whole range, `(0, 5)` none."""
    none, full = (stage(layers=(1, 2), recompute=mode).activations_bytes for mode in ("none", "full"))
    two = stage(layers=(1, 4), recompute="full", recompute_layers=2).activations_bytes
    assert stage(layers=(1, 4)).activations_bytes - two == pytest.approx(2 * (none - full))
    with pytest.raises(PlanError, match=r"^layers \[0, 5\) of a model of 4 ") as raised:
        stage(layers=(0, 5))
    assert raised.value.hint == "0 <= first < last <= number of layers is required"


def test_two_parts_on_one_chip_add_what_stays_and_compute_one_at_a_time():
    """The larger activations and buffers of the two, and both of everything else."""
    one = StageMemory(
        weights_bytes=1, gradients_bytes=2, optimizer_bytes=3, activations_bytes=40, buffers_bytes=5, reserve_bytes=6,
        stranded_bytes=7,
    )  # fmt: skip
    other = StageMemory(
        weights_bytes=10,
        gradients_bytes=20,
        optimizer_bytes=30,
        activations_bytes=4,
        buffers_bytes=50,
        reserve_bytes=60,
    )
    both = combine_copies(one, other)
    assert vars(both) == {
        "weights_bytes": 11,
        "gradients_bytes": 22,
        "optimizer_bytes": 33,
        "activations_bytes": 40,
        "buffers_bytes": 50,
        "reserve_bytes": 66,
        "stranded_bytes": 7,
    }
    assert (both.static_bytes, both.allocated_bytes, both.total_bytes) == (66, 156, 222)


def held(working, kept):
    return LayerMemory(
        dense_parameters=0,
        expert_parameters=0,
        activation_bytes=kept,
        working_bytes=working,
        largest_gradient_elements=0,
    )


LITTLE = MicroBatchLoad(tokens=1.0, sequence_length=1, precision_bytes=2)
TABLE = 32000 * 256


@pytest.mark.parametrize(
    ("layers", "is_first", "peak"),
    [
        ([(5, 2), (7, 3)], False, 7),
        ([(50, 2), (7, 3)], False, 47),
        ([(5, 2), (7, 30)], False, 7),
        ([(-1, 2), (-2, 3)], False, 0),
        ([(5, 2), (7, 3)], True, 2 * TABLE - 5),
    ],
)
def test_a_backward_pass_frees_layer_by_layer(layers, is_first, peak):
    """From the last layer to the first; then, on the first stage, the embedding's gradient. Never below none."""
    memories = [held(*one) for one in layers]
    assert working_bytes(DENSE, memories, LITTLE, Sharding(), is_first=is_first, is_last=False) == peak


def test_the_head_holds_logits_their_gradient_and_that_of_its_weight():
    """Eight bytes a logit with log-probabilities; or, in fp32, the logits and the weight's gradient; over `tp`."""

    def peak(tokens, each, tp=1):
        load = MicroBatchLoad(tokens=tokens, sequence_length=int(tokens), precision_bytes=each)
        return working_bytes(DENSE, [held(0, 0)], load, Sharding(tp=tp), is_first=False, is_last=True)

    assert peak(1000.0, 2) == 8 * 1000 * 32000
    assert peak(1000.0, 2, tp=4) == 8 * 1000 * 32000 / 4
    assert peak(10.0, 2) == 2 * TABLE
    assert peak(10.0, 4) == 4 * 10 * 32000 + 4 * TABLE
    assert peak(10.0, 4, tp=2) == (4 * 10 * 32000 + 4 * TABLE) / 2


def test_a_tied_heads_gradient_is_kept_until_the_embeddings_is_added():
    """Then two gradients of the table are live in place of one; the head's activations are freed by then."""
    load = MicroBatchLoad(tokens=1.0, sequence_length=1, precision_bytes=2)

    def peak(profile, is_first):
        return working_bytes(profile, [held(0, 100)], load, Sharding(), is_first=is_first, is_last=True)

    freed = sum(part.activation_bytes(1.0, 1, 2) for part in (TIED.head, TIED.final_norm))
    assert peak(TIED, True) == 4 * TABLE - freed - 100
    assert peak(TIED, False) == peak(DENSE, True) == 2 * TABLE


@pytest.mark.parametrize(("chip_bytes", "most"), [(100, 4), (99.9, 3), (60, 1), (10, 1)])
def test_as_many_micro_batches_are_in_flight_as_fit_beside_what_stays(chip_bytes, most):
    """At least one, beside what fragments lose; without activations there is no limit that matters."""
    memory = StageMemory(
        weights_bytes=10, gradients_bytes=5, optimizer_bytes=15, activations_bytes=15, buffers_bytes=10,
        reserve_bytes=0,
    )  # fmt: skip
    assert max_in_flight(memory, chip_bytes) == most
    nothing = StageMemory(
        weights_bytes=10, gradients_bytes=5, optimizer_bytes=15, activations_bytes=0, buffers_bytes=10, reserve_bytes=0
    )
    assert max_in_flight(nothing, chip_bytes) == 1 << 20


def test_the_memory_of_a_plans_stage_is_that_of_its_layers_and_degrees():
    """One micro-batch in flight; every degree, the precision and the recomputation reach the model of memory."""
    plan = plan_of(layers=4, clusters="ab", dp=2, precision="fp32", zero=1, tp=2, sp=True, recompute="full")
    plan = plan.model_copy(update={"sequence_length": TOKENS})
    stages = plan.stages[:2]
    for index, ends in enumerate(({"is_first": True, "is_last": False}, {"is_first": False, "is_last": True})):
        expected = stage_memory(
            DENSE, (2 * index, 2 * index + 2), **ends, micro_batch_size=plan.micro_batch_size, sequence_length=TOKENS,
            in_flight=1, precision="fp32", tp=2, sp=True, dp=2, zero=1, recompute="full",
        )  # fmt: skip
        assert plan_stage_memory(plan, DENSE, stages, index) == expected


@pytest.mark.parametrize(("precision", "each"), [("fp32", 4), ("tf32", 4), ("bf16", 2), ("fp8", 2)])
def test_bytes_of_a_weight_by_precision(precision, each):
    """tf32 is a mode of fp32 tensors; fp8 keeps bf16 weights."""
    assert weight_element_bytes(SimpleNamespace(precision=precision)) == each


def test_replicas_that_average_every_step_are_all_or_the_group():
    """With local steps the groups reduce gradients among themselves."""
    unset = dict.fromkeys(("formats", "sharding", "experts", "overlap_tp"))
    plan = SimpleNamespace(local_steps=1, dp=3, replica_groups=(0, 0, 1), zero=0, **unset)
    assert [num_reducing_replicas(plan, replica) for replica in range(3)] == [3, 3, 3]
    plan.local_steps = 4
    assert [num_reducing_replicas(plan, replica) for replica in range(3)] == [2, 2, 1]
    one = SimpleNamespace(replica=2, tp=1, cp=2, ep=4, sp=False, cp_kind="gather", cp_rates=())
    assert stage_degrees(plan, one) == StageDegrees(cp=2, ep=4, dp=1)


def test_local_steps_add_an_outer_optimizer_to_every_stage():
    """From two steps on."""
    plan = plan_of(layers=4, clusters="a", dp=2)
    apart = plan.stages[1].model_copy(update={"cluster": "b"})
    plan = Plan.model_validate(plan.model_dump() | {"stages": (plan.stages[0], apart)})
    local = Plan.model_validate(plan.model_dump() | {"local_steps": 2})
    every, some = (plan_stage_memory(one, DENSE, one.stages[:1], 0) for one in (plan, local))
    assert some.optimizer_bytes - every.optimizer_bytes == 8 * DENSE.num_parameters


def test_a_layer_is_cut_by_all_degrees():
    """Each expert by tensor parallelism only where experts are not dealt out; a degree below 1 is refused."""
    layer = SPARSE.layers[0]
    assert StageDegrees(tp=4, sp=True).sharding(layer) == Sharding(tp=4, sp=True, etp=4, routed_per_token=2)
    assert StageDegrees(tp=4, ep=2).sharding(layer) == Sharding(tp=4, ep=2, routed_per_token=2)
    for name in ("tp", "cp", "ep", "dp"):
        with pytest.raises(PlanError) as raised:
            StageDegrees(**{name: 0})
        assert str(raised.value) == f"{name} is 0 (a degree must be at least 1)"


def test_the_largest_gradient_of_a_layer_is_that_of_all_its_experts_together():
    """Of their gate and up projections, which are one tensor; of a dense layer it is the largest weight."""
    load = MicroBatchLoad(tokens=8.0, sequence_length=8, precision_bytes=2)
    sparse = layer_memory(SPARSE.layers[0], "none", Sharding(), load)
    assert sparse.largest_gradient_elements == 8 * 2 * 4096 * 14336
    dense = layer_memory(DENSE.layers[0], "none", Sharding(), load)
    assert dense.largest_gradient_elements == 4 * 256 * 256
    assert (dense.expert_parameters, sparse.expert_parameters) == (0, 8 * 3 * 4096 * 14336)


def test_a_recomputed_layer_is_rebuilt_in_its_backward_pass():
    """What it did not keep is live then."""
    load = MicroBatchLoad(tokens=4096.0, sequence_length=4096, precision_bytes=2)
    none, full = (layer_memory(DENSE.layers[0], mode, Sharding(), load) for mode in ("none", "full"))
    assert full.activation_bytes < none.activation_bytes
    rebuilt = none.activation_bytes - full.activation_bytes
    assert full.working_bytes - none.working_bytes == pytest.approx(rebuilt)


@pytest.mark.parametrize(("precision", "each"), [("fp32", 4), ("bf16", 2)])
def test_a_plans_precision_is_that_of_its_memory(precision, each):
    """Of the weights that compute uses."""
    plan = plan_of(layers=4, clusters="a", precision=precision)
    assert plan_stage_memory(plan, DENSE, plan.stages, 0).weights_bytes == each * DENSE.num_parameters
