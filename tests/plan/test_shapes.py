"""Rules of a model's parts timed alone: a prediction repeats what was measured, and knows the spread."""

import pytest

from isthmus.core.chip import chip_catalogue
from isthmus.core.pool import NodeGroup
from isthmus.plan.calibrate.measured_shapes import calibrate_shapes
from isthmus.plan.calibrate.micro_benchmarks import MIN_RELATIVE_UNCERTAINTY, ShapeTiming
from isthmus.plan.memory.stage_degrees import StageDegrees
from isthmus.plan.profile.model_profile import profile_model
from isthmus.plan.time.calibration import DATA_SHEET
from isthmus.plan.time.predict import relative_uncertainty
from isthmus.plan.time.stage_time import ChipModel, MicroBatchShape, stage_pass_time, update_s
from tests.plan.hand import model_of, plan_of, pool_of

CHIP = chip_catalogue()["CPU-core"]
PROFILE = profile_model(model_of())
BATCH = MicroBatchShape(micro_batch_size=1, sequence_length=256, precision="fp32")
PARAMETERS = 1_000_000


def timing(**more: object) -> ShapeTiming:
    """Return parts of round figures."""
    fields = {
        "hidden_size": PROFILE.hidden_size,
        "vocab_size": PROFILE.vocab_size,
        "micro_batch_size": 1,
        "sequence_length": 256,
        "layer_s": (0.02,),
        "embedding_s": (0.001,),
        "head_s": (0.005,),
        "update_s": (0.012,),
        "update_parameters": PARAMETERS,
        "step_s": (0.002,),
    }
    return ShapeTiming.model_validate(fields | more)


def host(*measured: ShapeTiming) -> ChipModel:
    """Return a core under the calibration that `measured` gives."""
    group = NodeGroup(name="g", chip=CHIP.name, nodes=1, chips_per_node=1)
    return ChipModel.of(group, CHIP, calibrate_shapes(DATA_SHEET, CHIP, PROFILE, "fp32", measured))


def passes_s(of: ChipModel, first: int, last: int) -> float:
    """Return forward and backward of these layers together."""
    time = stage_pass_time(PROFILE, (first, last), of, BATCH, StageDegrees())
    return time.forward_s + time.backward_s


def test_a_stage_takes_what_its_parts_took():
    """Layers, embedding and head add up to what was measured of each."""
    here, count = host(timing()), PROFILE.num_layers
    assert passes_s(here, 1, 3) == pytest.approx(0.04)
    assert passes_s(here, 0, 1) == pytest.approx(0.021)
    assert passes_s(here, count - 1, count) == pytest.approx(0.025)


def test_an_update_takes_what_it_took_with_the_step_beside_it():
    """The update of as many parameters, and the part that has nothing to do with their number."""
    here = host(timing())
    assert here.rates.step_s == pytest.approx(0.002)
    assert update_s(here, PARAMETERS, 4) == pytest.approx(0.010)
    assert update_s(here, 2 * PARAMETERS, 4) == pytest.approx(0.020)


def test_an_earlier_measurement_is_replaced():
    """A second measurement on top of the first gives what it would give alone."""
    once = calibrate_shapes(DATA_SHEET, CHIP, PROFILE, "fp32", [timing(update_s=(0.1,))])
    again = calibrate_shapes(once, CHIP, PROFILE, "fp32", [timing()])
    alone = calibrate_shapes(DATA_SHEET, CHIP, PROFILE, "fp32", [timing()])
    for key, one in alone.parameters.items():
        assert again.parameters[key].value == pytest.approx(one.value)


def test_another_size_of_micro_batch_is_not_touched():
    """What was measured holds for its own number of tokens."""
    other = MicroBatchShape(micro_batch_size=2, sequence_length=256, precision="fp32")
    group = NodeGroup(name="g", chip=CHIP.name, nodes=1, chips_per_node=1)
    plain = ChipModel.of(group, CHIP, DATA_SHEET)
    found = [stage_pass_time(PROFILE, (1, 2), one, other, StageDegrees()).forward_s for one in (host(timing()), plain)]
    assert found[0] == pytest.approx(found[1])


def test_the_usual_repetition_counts_and_the_spread_is_told():
    """The median of all copies; half of what the middle half spans is the uncertainty, above a least."""
    steady, scattered = timing(), timing(layer_s=(0.02, 0.02, 0.03, 0.04, 0.04))
    made = calibrate_shapes(DATA_SHEET, CHIP, PROFILE, "fp32", [scattered])
    key = next(key for key in made.parameters if key.endswith("/shape_time"))
    assert passes_s(host(scattered), 1, 2) == pytest.approx(0.03)
    assert made.parameters[key].relative == pytest.approx(1 / 3)
    least = calibrate_shapes(DATA_SHEET, CHIP, PROFILE, "fp32", [steady, steady])
    assert least.parameters[key].relative == MIN_RELATIVE_UNCERTAINTY


def test_the_spread_of_a_part_widens_the_band():
    """A prediction at the measured size is as sure as its parts; one at another size does not know them."""
    pool, plan = pool_of("CPU-core", "CPU-core"), plan_of(precision="fp32", sequence_length=256)
    steady, scattered = (
        calibrate_shapes(DATA_SHEET, CHIP, PROFILE, "fp32", [timing(layer_s=layer_s)])
        for layer_s in ((0.02,), (0.015, 0.015, 0.02, 0.025, 0.025))
    )
    same, other = (
        [relative_uncertainty(one, pool, PROFILE, made) for made in (steady, scattered)]
        for one in (plan, plan.model_copy(update={"sequence_length": 512}))
    )
    assert same[1] > same[0] + 0.005
    assert other[0] == pytest.approx(other[1])
