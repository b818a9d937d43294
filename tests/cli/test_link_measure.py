"""Rules of measuring links: a flow reaches what an emulated link offers, and mistakes are named."""

import pytest

from isthmus.cli.commands.measure_links import measure_links
from isthmus.core.errors import InputError
from isthmus.core.pool import Pool
from isthmus.plan import DATA_SHEET
from isthmus.plan.calibrate.micro_benchmarks import calibrate_links


def pool_of(*links: dict) -> Pool:
    """Return two clusters with these links."""
    group = {"name": "g", "chip": "CPU-core", "nodes": 1, "chips_per_node": 1}
    return Pool.model_validate(
        {"clusters": [{"name": n, "owner": "o", "node_groups": [group]} for n in "ab"], "links": list(links)}
    )


@pytest.mark.on_the_clock
@pytest.mark.slow
def test_a_flow_reaches_what_an_emulated_link_offers():
    """On 100 Mbit/s at 10 ms, both ways, the share of the goodput is within 15 % of 1, kept by link."""
    pool = pool_of({"between": ["a", "b"], "bandwidth_gbps": 0.1, "round_trip_ms": 10})
    shares = measure_links(pool, duration_s=0.5)
    assert set(shares) == {("a", "b"), ("b", "a")}
    for found in shares.values():
        assert len(found) == 3
        assert sorted(found)[1] == pytest.approx(1, abs=0.15)
    made = calibrate_links(DATA_SHEET, {f"{a}>{b}": found for (a, b), found in shares.items()})
    assert made.value("wan_share", "a>b") == pytest.approx(1, abs=0.15)
    assert made.relative_uncertainty("wan_share", "a>b") < DATA_SHEET.relative_uncertainty("wan_share")
    assert "link-a>b" in made.fitted_on


def test_a_pool_without_links_has_nothing_to_measure():
    """The mistake says so."""
    with pytest.raises(InputError, match="no links"):
        measure_links(pool_of())


def test_routes_must_hold_every_link():
    """A route that is missing is named."""
    pool = pool_of({"between": ["a", "b"], "bandwidth_gbps": 0.1, "round_trip_ms": 10})
    with pytest.raises(InputError, match="no route from a to b"):
        measure_links(pool, {"b": {"a": "127.0.0.1:1"}})
