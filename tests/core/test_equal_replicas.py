"""A plan of equal replicas in few lines: written once, read by every reader as the whole plan."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import FileError
from isthmus.core.files.user_files import json_schema, load_plan
from isthmus.core.plan import Plan
from tests.plan.plans import grids, staged

TEXT = """
id: many
stages:
  - {cluster: a, node_group: g, layers: [0, 4], tp: 8}
  - {cluster: b, node_group: g, layers: [4, 8], tp: 8}
dp: 512
equal_replicas: true
micro_batches: 8
micro_batch_size: 1
sequence_length: 4096
"""


def test_512_equal_replicas_take_fifteen_lines(tmp_path):
    """The file stands for 1,024 stages, numbered by replica."""
    file = tmp_path / "plan.yaml"
    file.write_text(TEXT.strip(), encoding="utf-8")
    plan = load_plan(file)
    assert len(plan.stages) == 1024
    assert plan.replica_kinds == (tuple(range(512)),)
    assert len(yaml.safe_dump(plan.as_document(), default_flow_style=None).splitlines()) <= 15
    assert "equal_replicas" in json_schema("plan")["properties"]


@given(grids())
def test_a_document_reads_back_as_the_plan(plan):
    """Whatever the degrees, the short form stands for the same plan, in JSON and in YAML."""
    document = plan.as_document()
    assert Plan.model_validate(document) == plan
    assert Plan.model_validate(json.loads(json.dumps(document))) == plan
    assert ("equal_replicas" in document) == (plan.dp > 1)


def test_unlike_replicas_are_written_in_full():
    """One replica with another degree: all stages stay."""
    plan = staged((4, 4), dp=3)
    stages = [stage.model_copy(update={"tp": 2}) if stage.replica == 2 else stage for stage in plan.stages]
    unlike = Plan.model_validate(dict(plan) | {"stages": stages})
    assert "equal_replicas" not in unlike.as_document()
    assert Plan.model_validate(unlike.as_document()) == unlike


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("dp: 512", "dp: 1000000000", "at most 100,000 stages"),
        ("dp: 512", "dp: -3", "equal_replicas"),
        ("dp: 512", "dp: many", "dp"),
        ("tp: 8}", "tp: 8, replica: 1}", "replica 0 alone"),
        ("equal_replicas: true", "equal_replicas: 7", "equal_replicas is true or false"),
        ("equal_replicas: true", "equal_replicas: false", "dp is 512"),
    ],
)
def test_hostile_shorthand_is_refused(tmp_path, old, new, said):
    """Numbers beyond any plan, and stages that contradict it, are named; nothing is expanded before the check."""
    file = tmp_path / "plan.yaml"
    file.write_text(TEXT.replace(old, new, 1).strip(), encoding="utf-8")
    with pytest.raises(FileError, match=said):
        load_plan(file)


@given(st.integers(1, 40))
def test_counts_of_replicas_survive(dp):
    """Any dp comes back."""
    plan = staged((4, 4), dp=dp)
    assert Plan.model_validate(plan.as_document()).dp == dp
