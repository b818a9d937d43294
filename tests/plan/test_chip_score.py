"""Rules of the evaluation of chips in three dimensions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.chip import Chip, InNodeLink, SustainedRates, chip_catalogue
from isthmus.core.errors import InputError
from isthmus.plan.profile.chip_score import DimensionWeights, evaluate_chips, model_weights, render_chip_scores
from isthmus.plan.profile.layer_matrix import layer_matrix
from isthmus.plan.profile.model_profile import profile_model
from tests.plan.published import published

CHIPS = [chip_catalogue()[name] for name in ("H20", "H100", "A100", "BI-V150")]
weight = st.floats(0.01, 10)


@given(weight, weight, weight)
def test_scores_lie_between_the_dimensions_and_come_best_first(compute, memory, communication):
    """A mean is between its parts; the list is ordered; 1 is the best in each dimension."""
    weights = DimensionWeights(compute=compute, memory=memory, communication=communication)
    scores = evaluate_chips(CHIPS, weights).scores
    assert [one.score for one in scores] == sorted((one.score for one in scores), reverse=True)
    for one in scores:
        parts = (one.compute, one.memory, one.communication)
        assert min(parts) * (1 - 1e-9) <= one.score <= max(parts) * (1 + 1e-9) <= 1 + 2e-9


def test_one_dimension_alone_ranks_by_that_dimension():
    """H20 has little compute and much memory: which weight is given decides whether it beats A100."""

    def order(**weights):
        none = {"compute": 0.0, "memory": 0.0, "communication": 0.0}
        return [one.chip for one in evaluate_chips(CHIPS, DimensionWeights(**none | weights)).scores]

    assert order(compute=1).index("A100") < order(compute=1).index("H20")
    assert order(memory=1).index("H20") < order(memory=1).index("A100")


@given(st.floats(0.1, 100))
def test_only_proportions_of_weights_matter(factor):
    """Weights (1, 2, 3) and any multiple of them give one answer."""
    plain = evaluate_chips(CHIPS, DimensionWeights(compute=1, memory=2, communication=3))
    scaled = evaluate_chips(CHIPS, DimensionWeights(compute=factor, memory=2 * factor, communication=3 * factor))
    assert [one.score for one in plain.scores] == pytest.approx([one.score for one in scaled.scores])


def test_a_model_s_layers_give_the_weights():
    """Few tokens wait for memory, many for compute."""
    profile = profile_model(published("llama-3.1-8b"))

    def weights(tokens):
        rows = layer_matrix(profile, sequence_length=4096, num_tokens=tokens)
        return model_weights(rows, chip_catalogue()["H100"])

    assert weights(1).memory > weights(1).compute
    assert weights(8192).compute > weights(8192).memory


@pytest.mark.parametrize("weights", [{"compute": -1.0}, {"compute": 0.0, "memory": 0.0, "communication": 0.0}])
def test_weights_that_weigh_nothing_are_refused(weights):
    """A weight is never negative, and not all are nothing."""
    with pytest.raises(InputError, match="weights"):
        DimensionWeights(**weights)


def test_no_chips_is_refused():
    """There must be something to compare."""
    with pytest.raises(InputError, match="no chips"):
        evaluate_chips([])


def test_the_printed_scores_have_a_line_for_each_chip():
    """Two lines of head, then the chips, best first, then what was not measured."""
    found = evaluate_chips(CHIPS)
    lines = render_chip_scores(found).splitlines()
    assert [line.split()[0] for line in lines[2:6]] == [one.chip for one in found.scores]
    assert "link latency counts nothing: not measured for H20, BI-V150" in lines


def chip(name, *, latency_s=None, reduce_s=None, rate=None):
    """A chip whose data sheet equals the others'."""
    rates = {"memory_latency_s": latency_s, "small_all_reduce_s": reduce_s}
    if rate:
        rates["matmul_flop_per_s"] = {"bf16": rate}
    given = {key: value for key, value in rates.items() if value}
    return Chip(
        name=name, peak_flop_per_s={"bf16": 1e15, "int8": 2e15}, memory_bytes=80 * 10**9,
        memory_bandwidth_bytes_per_s=3e12, in_node_link=InNodeLink(name="x", bandwidth_bytes_per_s=4e11),
        sustained=SustainedRates(**given, sources=dict.fromkeys(given, "this test")) if given else None,
    )  # fmt: skip


def test_measured_latencies_enter_memory_and_communication():
    """Known answer: twice the latency is half in one of three, or two, quantities of equal weight."""
    pair = [chip("a", latency_s=2e-7, reduce_s=4e-5), chip("b", latency_s=4e-7, reduce_s=8e-5)]
    found = evaluate_chips(pair)
    slow = found.scores[1]
    assert (slow.chip, slow.compute) == ("b", 1.0)
    assert slow.memory == pytest.approx(0.5 ** (1 / 3))
    assert slow.communication == pytest.approx(0.5 ** (1 / 2))
    assert {"memory latency", "link latency"} <= set(found.measured)


def test_a_measurement_counts_only_where_every_chip_has_one():
    """A latency and a throughput that one chip lacks are left out for all, and named."""
    found = evaluate_chips([chip("a", latency_s=2e-7, rate=5e14), chip("b")])
    assert {one.score for one in found.scores} == {1.0}
    assert found.unmeasured["memory latency"] == found.unmeasured["bf16 throughput"] == ("b",)
    both = evaluate_chips([chip("a", rate=5e14), chip("b", rate=1e15)], precision="bf16")
    assert both.scores[1].compute == pytest.approx(0.5)
