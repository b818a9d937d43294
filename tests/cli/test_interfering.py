"""`isthmus simulate --interfering`: traffic of others slows best-effort links, and leaves reserved ones alone."""

import pytest
import yaml

from isthmus.core.errors import FileError
from isthmus.core.files.user_files import load_model_file
from isthmus.core.pool import Link, Pool
from isthmus.core.runs.cross_traffic import CrossTraffic
from isthmus.plan import DATA_SHEET, estimate_s, predict, profile_model
from isthmus.plan.search.costs.routes import Routes
from isthmus.plan.time.plan_links import simulated_links
from tests.cli.test_plan_commands import answer, folder, run
from tests.plan.hand import model_of, plan_of, pool_of

__all__ = ["folder"]


def traffic(where, *rows: dict) -> object:
    """Write a file of cross traffic."""
    file = where / "traffic.yaml"
    file.write_text(yaml.safe_dump({"traffic": list(rows)}))
    return file


def reserved(pool: Pool) -> Pool:
    """Return the pool with every link reserved."""
    links = tuple(link.model_copy(update={"link_class": "reserved"}) for link in pool.links)
    return pool.model_copy(update={"links": links})


def test_traffic_of_others_slows_a_plan_and_is_named(folder):
    """Half of the rate taken always takes longer than half of the time taken; none when the link is another's."""
    words = ("simulate", folder / "far.yaml", "--pool", folder / "pool.yaml")
    pool = yaml.safe_load((folder / "pool.yaml").read_text())
    gbps = pool["links"][0]["bandwidth_gbps"]
    ends = pool["links"][0]["between"]
    alone = answer(*words)["iteration_s"]
    often = answer(
        *words, "--interfering", traffic(folder, {"between": ends, "gbps": gbps / 2, "on_s": 0.005, "off_s": 0.005})
    )
    always = answer(*words, "--interfering", traffic(folder, {"between": ends, "gbps": gbps / 2}))
    assert alone < often["iteration_s"] < always["iteration_s"]
    assert any("Gbit/s, always" in note for note in always["assumptions"])


def test_a_reserved_link_keeps_its_rate():
    """Interference takes nothing from it, and planner, closed form and simulator reach the same, higher share."""
    plan, profile, pool = plan_of(clusters="ab", micro_batch_size=4), profile_model(model_of()), pool_of("H100", "H100")
    kept = reserved(pool)
    other = {("a", "b"): next(iter(_half(pool).values())), ("b", "a"): next(iter(_half(pool).values()))}
    assert predict(plan, kept, profile, interference=other).iteration_s == predict(plan, kept, profile).iteration_s
    assert predict(plan, pool, profile, interference=other).iteration_s > predict(plan, pool, profile).iteration_s
    assert predict(plan, kept, profile).iteration_s < predict(plan, pool, profile).iteration_s
    assert estimate_s(plan, kept, profile) < estimate_s(plan, pool, profile)
    wire = simulated_links(plan, kept, DATA_SHEET)["a", "b"]
    route = Routes(kept, DATA_SHEET).route("a", "b")
    assert route is not None
    assert wire.bytes_per_s == route.bytes_per_s
    fitted = DATA_SHEET.with_values({"a>b/wan_share": 0.6})
    ratio = simulated_links(plan, kept, fitted)["a", "b"].bytes_per_s / wire.bytes_per_s
    assert ratio == pytest.approx(0.6 / DATA_SHEET.value("reserved_share")), "what was measured goes before the class"


def _half(pool: Pool) -> dict:
    from isthmus.sim import Interference

    return {"a>b": Interference(bytes_per_s=pool.links[0].bandwidth_bytes_per_s / 2)}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"between": ["a", "zz"], "gbps": 1}, "no link from a to zz"),
        ({"between": ["a"], "gbps": 1}, "between"),
        ({"from": "a", "to": "b", "gbps": -1}, "gbps"),
        ({"from": "a", "to": "b", "gbps": float("nan")}, "gbps"),
        ({"from": "a", "to": "b", "gbps": 1, "on_s": 0}, "on_s"),
        ({"from": "a", "to": "b", "gbps": 1, "off_s": float("inf")}, "off_s"),
        ({"from": "a", "to": "b", "gbps": 1, "rate": 2}, "unknown field 'rate'"),
        ({"from": "a", "to": "b", "gbps": 1e9}, "uses all of its"),
        ("text", "traffic"),
    ],
)
def test_hostile_traffic_is_refused_by_name(folder, row, said):
    """Unknown ends, rates and times that are none, fields that are none: exit code 2 and the word."""
    words = ("simulate", folder / "far.yaml", "--pool", folder / "pool.yaml")
    status, text = run(*words, "--interfering", traffic(folder, row))
    assert status == 2, text
    assert said in text


def test_a_direction_twice_and_an_empty_file_are_refused(tmp_path):
    """Two rates of one direction could mean either; a file without traffic is a mistake."""
    for rows in (({"between": ["a", "b"], "gbps": 1}, {"from": "a", "to": "b", "gbps": 2}), ()):
        with pytest.raises(FileError):
            load_model_file(traffic(tmp_path, *rows), CrossTraffic)
    assert Link.model_validate({"from": "a", "to": "b", "bandwidth_gbps": 1, "delay_ms": 1}).link_class == "best-effort"
