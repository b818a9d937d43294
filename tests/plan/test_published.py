"""Rules of `benchmarks.published`: sources are named, seen runs are never scored, and the tasks stay met."""

import re

import pytest
import yaml

from benchmarks import _rows, _tasks, _vtrain
from isthmus.core.errors import InputError


@pytest.mark.slow
def test_the_reports_tasks_are_predicted_from_tasks_1_and_3():
    """Mean error at most 5 %, worst at most 10 %; what was fitted on is met to 0.5 %."""
    rows = {row.what: row for row in _tasks.rows()}
    summary = {re.sub(r".*predicted: (\w+).*", r"\1", what): row for what, row in rows.items() if "predicted" in what}
    assert summary["mean"].ours <= 5
    assert summary["worst"].ours <= 10
    for what, row in rows.items():
        if "calibrated on it" in what:
            assert row.ratio == pytest.approx(1, abs=0.005)


def test_a_seen_task_is_never_compared():
    """The calibration of the tasks names both and refuses them."""
    calibration = _tasks.calibrate()
    assert calibration.fitted_on == ("task 1", "task 3")
    with pytest.raises(InputError, match="was fitted on 'task 3'"):
        calibration.require_unseen("task 3")


def test_mixtral_of_70_layers_has_101_billion_parameters():
    """The dimensions of Mixtral 8x7B give the report's 101 B with 70 layers, and 80 B with 56."""
    assert 101e9 < _tasks.model_of(70).num_parameters < 102e9
    assert 80e9 < _tasks.model_of(56).num_parameters < 82e9


def test_every_published_row_names_its_source_and_counts_its_chips():
    """Chips are a whole number of replicas, batches of micro-batches; every group has a known source."""
    document = yaml.safe_load(_rows.DATA.read_text(encoding="utf-8"))
    rows = [(group, row) for group in document["groups"] for row in group["rows"]]
    assert len(rows) >= 12
    for group, row in rows:
        assert row.get("source", group["source"]) in document["sources"]
        model_chips = row["tp"] * row["pp"] * row.get("cp", 1)
        assert row["chips"] % model_chips == 0
        assert row["batch"] % (row["micro"] * (row["chips"] // model_chips)) == 0


def test_the_ops_of_a_paper_are_counted_as_it_counts_them():
    """SC 2021's 145 B model: 148 TFLOP/s on 1,536 chips with a batch of 2,304 is 24.8 s."""
    document = yaml.safe_load(_rows.DATA.read_text(encoding="utf-8"))
    group = document["groups"][0]
    row = next(row for row in group["rows"] if row["model"] == "gpt-145b")
    assert _rows.Run(document, group, row).measured_s == pytest.approx(24.8, rel=0.01)


def test_without_vtrains_data_the_benchmark_says_how_to_get_it(tmp_path):
    """One row, no judgement, and the repository's name."""
    (row,) = _vtrain.rows(tmp_path, quick=True)
    assert "skipped" in row.what
    assert _vtrain.REPOSITORY in row.what
    assert row.met is None


def test_vtrains_points_are_read_and_split_by_seed(tmp_path):
    """The adapter reads both tables; a split is a function of its seed and keeps a tenth at most."""
    (tmp_path / "data").mkdir()
    head = "GPUs,batch,micro,hidden,heads,layers,length,tp,dp,pp,ms\n"
    lines = [f"8,16,{1 + i % 2},1024,16,12,1024,2,2,2,{100 + i}\n" for i in range(40)]
    (tmp_path / "data" / "ground_truth_single.csv").write_text("\ufeff" + head + "".join(lines), encoding="utf-8")
    points = _vtrain.read_points(tmp_path, "single")
    assert points[3].measured_s == pytest.approx(0.103)
    seen, unseen = _vtrain.split(points, 0)
    assert (len(seen), len(unseen)) == (4, 36)
    assert [p.name for p in _vtrain.split(points, 0)[0]] == [p.name for p in seen]
    calibration = _vtrain.calibrated(seen, shapes=True)
    assert _vtrain.mean_error(unseen, calibration) < 1000
    with pytest.raises(InputError, match="was fitted on"):
        _vtrain.mean_error(seen, calibration)
