"""Rules of micro-benchmarks: shares are of the data sheet, the fastest repetition counts, scatter is reported."""

import pytest

from isthmus.core.chip import chip_catalogue
from isthmus.plan.calibrate.micro_benchmarks import MIN_MESSAGE_S, Measurement, Timing, calibrate_chip, calibrate_links
from isthmus.plan.time.calibration import DATA_SHEET
from isthmus.plan.time.plan_links import simulated_links
from isthmus.plan.time.predict import used_parameter_keys
from tests.plan.hand import plan_of, pool_of

CHIP = chip_catalogue()["CPU-core"]
PEAK = CHIP.flop_per_s("fp32")


def measured(**more: object) -> Measurement:
    """Return micro-benchmarks of a chip at half its peak and a fifth of its bandwidth."""
    rate = CHIP.memory_bandwidth_bytes_per_s
    fields = {
        "device": "cpu",
        "precision": "fp32",
        "matmul": (Timing(name="m", flops=PEAK, seconds=(3.0, 2.0, 9.0)),),
        "memory": (Timing(name="c", num_bytes=rate, seconds=(5.0,)),),
        "launch": (Timing(name="l", seconds=(1e-3,)),),
    }
    return Measurement.model_validate(fields | more)


def test_shares_are_of_the_data_sheet_and_other_work_does_not_count():
    """Half the peak and a fifth of the bandwidth are said so, for this chip alone."""
    made = calibrate_chip(CHIP, measured(), name="here")
    assert made.value("matmul_share", "CPU-core") == pytest.approx(0.5)
    assert made.value("memory_share", "CPU-core") == pytest.approx(0.2)
    assert made.value("launch_s", "CPU-core") == pytest.approx(1e-3)
    assert made.value("matmul_share", "A100") != pytest.approx(0.5)
    assert made.fitted_on == ("m", "c", "l")


def test_sizes_that_disagree_leave_a_wider_uncertainty():
    """Products that reach the same share leave the least uncertainty, unlike ones more."""
    same = (Timing(name="a", flops=PEAK, seconds=(2.0,)), Timing(name="b", flops=PEAK, seconds=(2.0,)))
    unlike = (Timing(name="a", flops=PEAK, seconds=(2.0,)), Timing(name="b", flops=PEAK, seconds=(4.0,)))
    found = [
        calibrate_chip(CHIP, measured(matmul=one), name="x").relative_uncertainty("matmul_share", "CPU-core")
        for one in (same, unlike)
    ]
    assert found[0] < found[1]


def test_links_are_kept_by_their_ends():
    """A link's share is its own; other links keep the default."""
    made = calibrate_links(calibrate_chip(CHIP, measured(), name="x"), {"a>b": [0.9, 0.91, 0.92]})
    assert made.value("wan_share", "a>b") == pytest.approx(0.91)
    assert made.value("wan_share", "b>a") == pytest.approx(0.8)
    assert made.fitted_on[-1] == "link-a>b"


def test_a_message_takes_what_forwards_it_beside_delay_and_bytes():
    """What messages took is kept by link and lengthens the wire's delay; a clock's noise is not negative."""
    made = calibrate_links(DATA_SHEET, {"a>b": [1.0], "b>a": [1.0]}, {"a>b": [2e-3, 3e-3], "b>a": [-1e-4]})
    assert made.value("message_s", "a>b") == pytest.approx(2.5e-3)
    assert made.value("message_s", "b>a") == MIN_MESSAGE_S
    pool, plan = pool_of("H20", "H20"), plan_of()
    plain = simulated_links(plan, pool, DATA_SHEET)["a", "b"].delay_s
    assert simulated_links(plan, pool, made)["a", "b"].delay_s == pytest.approx(plain + 2.5e-3)
    assert {"a>b/message_s", "b>a/message_s"} <= set(used_parameter_keys(plan, pool, made))
