"""Rules of the evaluation of chips in three dimensions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.chip import chip_catalogue
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
    scores = evaluate_chips(CHIPS, weights)
    assert [one.score for one in scores] == sorted((one.score for one in scores), reverse=True)
    for one in scores:
        parts = (one.compute, one.memory, one.communication)
        assert min(parts) * (1 - 1e-9) <= one.score <= max(parts) * (1 + 1e-9) <= 1 + 2e-9


def test_one_dimension_alone_ranks_by_that_dimension():
    """H20 has little compute and much memory: which weight is given decides whether it beats A100."""

    def order(**weights):
        none = {"compute": 0.0, "memory": 0.0, "communication": 0.0}
        return [one.chip for one in evaluate_chips(CHIPS, DimensionWeights(**none | weights))]

    assert order(compute=1).index("A100") < order(compute=1).index("H20")
    assert order(memory=1).index("H20") < order(memory=1).index("A100")


@given(st.floats(0.1, 100))
def test_only_proportions_of_weights_matter(factor):
    """Weights (1, 2, 3) and any multiple of them give one answer."""
    plain = evaluate_chips(CHIPS, DimensionWeights(compute=1, memory=2, communication=3))
    scaled = evaluate_chips(CHIPS, DimensionWeights(compute=factor, memory=2 * factor, communication=3 * factor))
    assert [one.score for one in plain] == pytest.approx([one.score for one in scaled])


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
    """Two lines of head, then the chips, best first."""
    scores = evaluate_chips(CHIPS)
    lines = render_chip_scores(scores).splitlines()
    assert [line.split()[0] for line in lines[2:]] == [one.chip for one in scores]
