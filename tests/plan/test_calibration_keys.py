"""Which value a calibration gives for a chip or a link, by hand; sustained rates that complete it; files of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.core.chip import AttentionRate, Chip, SustainedRates
from isthmus.core.errors import FileError
from isthmus.core.link_throughput import effective_bytes_per_s
from isthmus.core.pool import Link, Pool
from isthmus.plan.time.calibration import (
    DATA_SHEET,
    Calibration,
    ChipRates,
    FittedParameter,
    load_calibration,
    save_calibration,
)
from isthmus.plan.time.chip_rates import (
    RELATIVE,
    SLOWEST_CHIP,
    complete_calibration,
    with_chip_rates,
    with_prior_rates,
)
from isthmus.plan.time.plan_links import reached_bytes_per_s, share_key, simulated_links
from isthmus.plan.time.time_model_parameters import TIME_MODEL_PARAMETERS
from isthmus.sim import Interference
from tests.plan.hand import plan_of, pool_of
from tests.plan.round_numbers import UNIT_CHIP, calibration_of


def fitted(**values: tuple[float, float]) -> Calibration:
    """A calibration of values with their uncertainty."""
    parameters = {key: FittedParameter(value=value, relative=doubt) for key, (value, doubt) in values.items()}
    return Calibration(name="c", source="s", parameters=parameters)


def test_a_link_has_its_own_value_then_that_of_both_directions_then_the_general_one() -> None:
    """In either order of the two ends; a chip's scope has no directions."""
    known = fitted(**{"a>b/wan_share": (0.1, 0.2), "b<>c/wan_share": (0.3, 0.4), "wan_share": (0.5, 0.6)})
    scopes = ("a>b", "b>a", "b>c", "c>b", "a>c", "")
    keys = ["a>b/wan_share", "wan_share", "b<>c/wan_share", "b<>c/wan_share", "wan_share", "wan_share"]
    assert [known.scoped_key("wan_share", scope) for scope in scopes] == keys
    assert [known.value("wan_share", scope) for scope in scopes] == [0.1, 0.5, 0.3, 0.3, 0.5, 0.5]
    assert [known.relative_uncertainty("wan_share", scope) for scope in scopes] == [0.2, 0.6, 0.4, 0.4, 0.6, 0.6]
    assert known.scoped_key("message_s", "b>c") == "message_s"
    chip = fitted(**{"b<>/launch_s": (0.1, 0.2)})
    assert chip.scoped_key("launch_s", "b") == "launch_s", "a chip's name is no end of a link"


def test_a_key_without_a_value_takes_that_of_its_scope_then_a_default_above_zero() -> None:
    """A fit starts from it: the smallest value where the default is none."""
    known = fitted(**{"launch_s": (2.0, 0.2), "a<>b/message_s": (3.0, 0.3)})
    assert [known.key_value(key) for key in ("launch_s", "H20/launch_s", "a>b/message_s")] == [2.0, 2.0, 3.0]
    assert [known.key_relative(key) for key in ("launch_s", "H20/launch_s", "a>b/message_s")] == [0.2, 0.2, 0.3]
    assert (known.key_value("c>d/message_s"), known.key_relative("c>d/message_s")) == (1e-6, 0.0)
    assert known.key_value("step_s") == TIME_MODEL_PARAMETERS["step_s"].default
    assert known.key_relative("x/step_s") == TIME_MODEL_PARAMETERS["step_s"].relative


def test_correlations_are_of_known_parameters_alone() -> None:
    """In rows and inside them."""
    parameters = {key: FittedParameter(value=1.0, relative=0.1) for key in ("launch_s", "step_s")}
    known = {"name": "c", "source": "s", "parameters": parameters}
    for wrong in ({"skew_s": {"step_s": 0.5}}, {"step_s": {"skew_s": 0.5}}):
        with pytest.raises(ValueError, match="correlation of 'skew_s', which is none of the calibration's parameters"):
            Calibration.model_validate(known | {"correlations": wrong})
    made = Calibration.model_validate(known | {"correlations": {"launch_s": {"step_s": -0.5}}})
    assert made.correlation("step_s", "launch_s") == made.correlation("launch_s", "step_s") == -0.5


def test_rates_of_a_chip_are_its_own_values() -> None:
    """Each parameter by its name, that of another chip not."""
    known = calibration_of(unit__launch_s=3.0, other__launch_s=5.0, skew_s=7.0)
    rates = ChipRates.of(known, "unit")
    assert (rates.launch_s, rates.skew_s) == (3.0, 7.0)
    assert rates.matmul_share == TIME_MODEL_PARAMETERS["matmul_share"].default


def test_a_calibration_is_written_as_it_is_read(tmp_path: Path) -> None:
    """In the order of its fields; a mistake is named with file, line and field."""
    known = fitted(**{"H20/launch_s": (2.0, 0.25)}).model_copy(update={"source": "größe", "fitted_on": ("run",)})
    file = tmp_path / "c.yaml"
    save_calibration(known, file)
    assert load_calibration(file) == load_calibration(str(file)) == known
    assert file.read_text(encoding="utf-8").startswith("version: 1\nname:")
    file.write_text("version: 1\nname: c\nsource: s\nparameters:\n  launch_s: {value: -1, relative: 0}\n")
    with pytest.raises(FileError) as raised:
        load_calibration(file)
    assert raised.value.file == str(file)
    assert raised.value.line == 5
    assert raised.value.field == "parameters.launch_s.value"
    file.write_text("version: 1\nname: c\nsource: s\nresidul: 0.1\n")
    with pytest.raises(FileError, match="did you mean 'residual'"):
        load_calibration(file)


FLASH = AttentionRate(kernel="flash2", forward_flop_per_s=250.0, backward_flop_per_s=200.0, source="tests")
STATED = UNIT_CHIP.model_copy(
    update={
        "sustained": SustainedRates(
            matmul_flop_per_s={"bf16": 600.0}, attention=(FLASH,), link_bytes_per_s=12.0, network_share=0.875,
            sources=dict.fromkeys(("matmul_flop_per_s", "link_bytes_per_s", "network_share"), "tests"),
        )
    }
)  # fmt: skip


def with_rates(**rates: object) -> Chip:
    """The chip with other sustained rates."""
    return STATED.model_copy(update={"sustained": STATED.sustained.model_copy(update=rates)})  # type: ignore[union-attr]


def completed(chip: Chip = STATED, calibration: Calibration = DATA_SHEET, stack: str = "megatron") -> dict[str, float]:
    """The values that the rates of a chip add."""
    made = complete_calibration(calibration, (chip,), stack)
    return {
        key: one.value for key, one in made.parameters.items() if key not in calibration.parameters
    }  # fmt: skip


def test_sustained_rates_are_shares_of_the_data_sheet() -> None:
    """600 of 1,000 in products, slower by the slowest chip; 250 of 1,000 in attention; 12 of 16 of the link."""
    assert completed() == pytest.approx(
        {
            "unit/matmul_share": 0.6 / SLOWEST_CHIP, "unit/attention_share": 0.25, "unit/link_share": 0.75,
            "unit/network_share": 0.875,
        }
    )  # fmt: skip
    made = complete_calibration(DATA_SHEET, (STATED,), "megatron")
    assert {key.rpartition("/")[2]: one.relative for key, one in made.parameters.items()} == RELATIVE
    assert completed(UNIT_CHIP) == completed(stack="isthmus") == {}
    assert complete_calibration(DATA_SHEET, (UNIT_CHIP,), "megatron") is DATA_SHEET


def test_what_a_chip_does_not_state_stays_as_it_was() -> None:
    """Rates of other precisions, kernels and links add nothing; a fitted value, general or its own, goes before."""
    for rates, missing in (
        ({"matmul_flop_per_s": {"fp8": 900.0}}, "matmul_share"), ({"attention": ()}, "attention_share"),
        ({"link_bytes_per_s": None}, "link_share"), ({"network_share": None}, "network_share"),
    ):  # fmt: skip
        assert set(RELATIVE) - {key.rpartition("/")[2] for key in completed(with_rates(**rates))} == {missing}
    other = FLASH.model_copy(update={"kernel": "cudnn"})
    assert "unit/attention_share" not in completed(with_rates(attention=(other,)))
    for key in ("link_share", "unit__link_share"):
        assert set(completed(calibration=calibration_of(**{key: 0.5}))) == {
            "unit/matmul_share", "unit/attention_share", "unit/network_share"
        }  # fmt: skip


def test_a_plan_completes_a_calibration_with_the_chips_of_its_stages() -> None:
    """Of both groups that it uses, of no other; of its own kernel."""
    pool = pool_of("H100", "A100", "H200")
    made = with_chip_rates(DATA_SHEET, plan_of(clusters="ab", stack="megatron"), pool)
    assert {key.partition("/")[0] for key in made.parameters} == {"H100", "A100"}
    assert with_chip_rates(DATA_SHEET, plan_of(clusters="ab"), pool) is DATA_SHEET


def test_a_fit_starts_from_the_rates_of_the_chips_of_all_runs() -> None:
    """Only of the keys that it fits; what the calibration knows stays."""
    known = calibration_of(launch_s=2.0, A100__attention_share=0.125)
    runs = [(plan_of(clusters="a", stack="megatron"), pool_of(chip)) for chip in ("H100", "A100")]
    keys = ["H100/matmul_share", "A100/matmul_share", "A100/attention_share", "H100/skew_s"]
    start = with_prior_rates(known, runs, keys)
    assert set(start.parameters) == {"launch_s", *keys[:3]}
    assert start.parameters["A100/attention_share"] == known.parameters["A100/attention_share"]
    assert start.parameters["H100/matmul_share"].relative == RELATIVE["matmul_share"]


def two_way_pool(kind: str = "best-effort") -> Pool:
    """Two clusters with links of a class."""
    pool = pool_of("A100", "A100", gbps=8.0)
    links = [one.model_copy(update={"link_class": kind}) for one in pool.links]
    return pool.model_copy(update={"links": tuple(links)})


def link_of(pool: Pool, a: str = "a", b: str = "b") -> Link:
    """The link from a to b."""
    return next(one for one in pool.links if (one.source, one.target) == (a, b))


def test_a_reserved_link_reaches_its_share_unless_one_was_fitted() -> None:
    """95 % of its rate, 80 % of one that others use; a fitted share counts for both kinds."""
    usual, reserved = link_of(two_way_pool()), link_of(two_way_pool("reserved"))
    assert (share_key(DATA_SHEET, usual), share_key(DATA_SHEET, reserved)) == ("wan_share", "reserved_share")
    other = calibration_of(launch_s=1.0)
    assert (share_key(other, usual), share_key(other, reserved)) == ("wan_share", "reserved_share")
    for key in ("wan_share", "a>b/wan_share", "b<>a/wan_share"):
        known = calibration_of(**{key: 0.5})
        assert share_key(known, usual) == share_key(known, reserved) == key
    opposite = calibration_of(**{"b>a/wan_share": 0.5})
    assert (share_key(opposite, usual), share_key(opposite, reserved)) == ("wan_share", "reserved_share")
    back = link_of(two_way_pool(), "b", "a")
    for link, share in ((usual, 0.8), (reserved, 0.95)):
        assert reached_bytes_per_s(DATA_SHEET, link, back) == pytest.approx(share * effective_bytes_per_s(link, back))
    assert reached_bytes_per_s(calibration_of(wan_share=0.5), usual, None) == pytest.approx(
        0.5 * effective_bytes_per_s(usual, None)
    )


def test_traffic_of_others_takes_from_best_effort_links_alone() -> None:
    """In the direction that it names; delays of a link are its own."""
    traffic = {("a", "b"): Interference(bytes_per_s=5.0)}
    plan = plan_of(clusters="ab")
    for kind, expected in (("best-effort", traffic["a", "b"]), ("reserved", None)):
        made = simulated_links(plan, two_way_pool(kind), DATA_SHEET, traffic)
        assert (made["a", "b"].interference, made["b", "a"].interference) == (expected, None)
        assert made["a", "b"].delay_s == pytest.approx(0.01)
    slow = simulated_links(plan, two_way_pool(), calibration_of(message_s=0.5, **{"a>b/message_s": 0.25}))
    assert (slow["a", "b"].delay_s, slow["b", "a"].delay_s) == pytest.approx((0.26, 0.51))
