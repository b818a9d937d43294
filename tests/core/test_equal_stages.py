"""A plan of even stages in few lines: one stage listed, cut into as many as `equal_stages` says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import FileError
from isthmus.core.files.user_files import json_schema, load_plan
from isthmus.core.plan import Plan

SIZES = {"id": "p", "micro_batches": 32, "micro_batch_size": 1, "sequence_length": 4096}
STAGE = {"cluster": "c", "node_group": "g", "tp": 8}


@given(count=st.integers(1, 40), more=st.integers(0, 90), dp=st.integers(1, 3))
def test_the_stages_share_all_layers_evenly(count, more, dp):
    """Every layer is in one stage, sizes differ by at most one, and all replicas have them."""
    plan = Plan.model_validate(
        {**SIZES, "equal_stages": count, "dp": dp, "equal_replicas": True}
        | {"stages": [{**STAGE, "layers": [0, count + more]}]}
    )
    sizes = [stage.num_layers for stage in plan.pipeline(dp - 1)]
    assert len(sizes) == count
    assert sum(sizes) == count + more
    assert max(sizes) - min(sizes) <= 1
    assert all(stage.tp == 8 for stage in plan.stages)
    assert len(plan.stages) == dp * count


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"equal_stages": 0}, "no number of stages"),
        ({"equal_stages": 10**12}, "no number of stages"),
        ({"equal_stages": True}, "no number of stages"),
        ({"equal_stages": "4"}, "no number of stages"),
        ({"equal_stages": 9}, "9 stages of 8 layers; nearest valid: 8"),
        ({"equal_stages": 2, "stages": []}, "list one stage"),
        ({"equal_stages": 2, "stages": [{**STAGE, "layers": [0, 4]}, {**STAGE, "layers": [4, 8]}]}, "list one stage"),
        ({"equal_stages": 2, "stages": [{**STAGE, "layers": [1, 8]}]}, "must be"),
        ({"equal_stages": 2, "stages": [{**STAGE, "layers": "all"}]}, "must be"),
        ({"equal_stages": 2, "stages": [{**STAGE, "layers": [0, True]}]}, "must be"),
        ({"equal_stages": 2, "stages": 5}, "list one stage"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(fields, why):
    """The message names the field, what is wrong, and what is possible."""
    with pytest.raises(ValueError, match=f"equal_stages: .*{why}"):
        Plan.model_validate({**SIZES, "stages": [{**STAGE, "layers": [0, 8]}], **fields})


def test_a_file_with_it_is_read_and_the_schema_has_it(tmp_path):
    """Sixteen stages in eight lines; a mistake is reported with its file."""
    file = tmp_path / "plan.yaml"
    text = "\n".join(f"{key}: {value}" for key, value in SIZES.items())
    stage = "\nstages:\n  - {cluster: c, node_group: g, layers: [0, 126]}\n"
    file.write_text(text + "\nequal_stages: 16" + stage, encoding="utf-8")
    assert len(load_plan(file).stages) == 16
    file.write_text(text + "\nequal_stages: 160" + stage, encoding="utf-8")
    with pytest.raises(FileError, match="160 stages of 126 layers"):
        load_plan(file)
    assert "equal_stages" in json_schema("plan")["properties"]
