"""Rules of the files users write: short, with defaults, and every mistake answered with its place."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isthmus.core.errors import FileError
from isthmus.core.files.user_files import (
    FILE_KINDS,
    field_meanings,
    json_schema,
    load_job,
    load_plan,
    load_policy,
    load_pool,
    load_tariff,
)

POOL = """\
clusters:
  - name: a
    owner: o
    node_groups:
      - {chip: H20, nodes: 2, chips_per_node: 8}
  - name: b
    owner: p
    node_groups:
      - {chip: BI-V150, nodes: 1, chips_per_node: 16}
links:
  - between: [a, b]
    bandwidth_gbps: 1
    round_trip_ms: 20
"""

RDMA = "    transport: rdma\n"
ONE_WAY = f"  - from: a\n{RDMA}    to: b\n    bandwidth_gbps: 1\n    delay_ms: 1\n  - from: b\n    to: a\n"

JOB = """\
name: first
model: model
data:
  paths: [text]
training:
  steps: 10
checkpoints: {folder: checkpoints}
output: out
"""

PLAN = """\
version: 1
id: by-hand
stages:
  - {cluster: a, node_group: h20, layers: [0, 3]}
  - {cluster: b, node_group: bi-v150, layers: [3, 4]}
micro_batches: 8
micro_batch_size: 1
sequence_length: 128
"""

POLICY = "pool_share: 0.5\n"
TARIFF = """\
currency: EUR
prices:
  - {cluster: a, node_group: g, per_chip_hour: 0.1, hours: "06:00-18:00"}
  - {cluster: a, node_group: g, per_chip_hour: 2, hours: "18:00-06:00"}
"""

LOADERS = {
    "pool": (load_pool, POOL),
    "job": (load_job, JOB),
    "plan": (load_plan, PLAN),
    "policy": (load_policy, POLICY),
    "tariff": (load_tariff, TARIFF),
}


def write(tmp_path, text, name="file.yaml"):
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    return file


def described(schema: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield model, field and description of every field of a schema."""
    for name, definition in ((schema["title"], schema), *schema["$defs"].items()):
        for field, found in definition.get("properties", {}).items():
            yield name, field, found.get("description", "")


def test_every_field_of_every_user_file_has_a_meaning_and_no_meaning_lacks_a_field():
    """`between` included: one line that says what it is, in the schema and in docs/formats.md."""
    fields = {(name, field): text for kind in FILE_KINDS for name, field, text in described(json_schema(kind))}
    assert [key for key, text in fields.items() if not text] == []
    assert {(name, field) for name, found in field_meanings().items() for field in found} == fields.keys()
    assert ("Link", "between") in fields
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    assert [key for key, text in fields.items() if f"| {text} |" not in page] == []


@pytest.mark.parametrize("kind", LOADERS)
def test_a_short_file_is_enough(tmp_path, kind):
    """The examples above load, and everything not said has a default."""
    load, text = LOADERS[kind]
    assert isinstance(load(write(tmp_path, text)), FILE_KINDS[kind])


def test_between_names_both_directions_and_a_node_group_is_named_after_its_chip(tmp_path):
    """`draw_uniform` with `round_trip_ms` gives two links of half the delay each."""
    pool = load_pool(write(tmp_path, POOL))
    assert [(x.source, x.target, x.delay_ms) for x in pool.links] == [("a", "b", 10.0), ("b", "a", 10.0)]
    assert pool.clusters[1].node_groups[0].name == "bi-v150"
    assert pool.link("b", "a") is not None
    assert pool.link("a", "a") is None


@pytest.mark.parametrize(
    ("kind", "old", "new", "line", "words"),
    [
        ("pool", "H20", "H2O", 5, ["clusters[0].node_groups[0].chip", "unknown chip 'H2O'", "'H20'"]),
        ("pool", "bandwidth_gbps: 1", "bandwidth_gbps: -1", 12, ["links[0].bandwidth_gbps", "-1"]),
        ("pool", "bandwidth_gbps", "bandwith_gbps", 12, ["'bandwith_gbps'", "'bandwidth_gbps'"]),
        ("pool", "[a, b]", "[a, c]", 11, ["links[0].between[1]", "unknown cluster 'c'", "known: a, b"]),
        ("pool", "round_trip_ms: 20", "round_trip_ms: -20", 13, ["links[0].round_trip_ms"]),
        ("pool", "[a, b]", f"[a, b]\n{RDMA}    loss: 0.01", 13, ["links[0].loss", "transport: rdma"]),
        ("pool", "[a, b]", f"[a, b]\n{RDMA}    reordering: 0.1", 13, ["links[0].reordering", "transport: rdma"]),
        ("pool", "[a, b]", f"[a, b]\n{RDMA}    congestion_control: cubic", 13, ["links[0].congestion_control"]),
        ("pool", "[a, b]", f"[a, b]\n{RDMA}    crossing: {{key: k}}", 13, ["links[0].crossing", "card to card"]),
        (
            "pool",
            "  - between: [a, b]\n",
            ONE_WAY,
            12,
            ["links[0].transport", "than b to it", "state one `between` link"],
        ),
        ("pool", "owner: p", "ownr: p", 7, ["'ownr'", "'owner'"]),
        ("pool", "nodes: 2", "nodes: two", 5, ["nodes", "'two'"]),
        ("pool", "name: b", "name: a", 1, ["'a' appears twice"]),
        ("pool", "- name: a", " name: a", 3, ["is not YAML"]),
        ("pool", "    owner: o", "    owner: o\n    owner: q", 4, ["clusters[0].owner", "appears twice"]),
        ("tariff", "0.1,", "-0.1,", 3, ["prices[0].per_chip_hour", "at least 0"]),
        ("tariff", "18:00-06:00", "17:59-06:00", 4, ["overlaps price 1", "at 17:59"]),
        ("tariff", "18:00-06:00", "18:00-05:00", 3, ["no price for class low from 05:00 to 06:00"]),
        ("tariff", "EUR", "euro", 1, ["currency"]),
        ("tariff", "per_chip_hour: 2", "per_card_hour: 2", 4, ["'per_card_hour'", "'per_chip_hour'"]),
        ("job", "steps: 10", "steps: 0", 6, ["training.steps", "0"]),
        ("job", "steps: 10", "stepz: 10", 6, ["'stepz'", "'steps'"]),
        ("job", "name: first", "name: first\npolicy: autom", 2, ["policy", "'autom'", "'auto'"]),
        ("job", "steps: 10", "steps: 10\n  micro_batch_size: 3", 5, ["training", "not a multiple"]),
        (
            "job",
            "steps: 10",
            "steps: 10\n  global_batch_size: 1000000000",
            7,
            ["global_batch_size", "1000000"],
        ),
        ("plan", "[3, 4]", "[2, 4]", 1, ["must start at 3"]),
        ("plan", "version: 1", "version: 2", 1, ["version"]),
    ],
)
def test_a_mistake_is_answered_with_file_line_field_value_and_nearest_word(tmp_path, kind, old, new, line, words):
    """What is wrong, where, and what would have been right."""
    load, text = LOADERS[kind]
    assert old in text
    with pytest.raises(FileError) as caught:
        load(write(tmp_path, text.replace(old, new, 1)))
    assert caught.value.line == line
    assert str(tmp_path / "file.yaml") in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_an_unreadable_file_is_named(tmp_path):
    """A missing, empty or binary file gives a clear error."""
    with pytest.raises(FileError, match="No such file"):
        load_pool(tmp_path / "none.yaml")
    with pytest.raises(FileError, match="contains no fields"):
        load_pool(write(tmp_path, ""))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileError, match="not UTF-8"):
        load_pool(tmp_path / "binary")


def test_relative_paths_of_a_job_start_where_the_job_file_is(tmp_path):
    """A job file can be submitted from anywhere; URLs and absolute paths stay as they are."""
    job = load_job(write(tmp_path, JOB.replace("[text]", "[text, s3://bucket/x, /abs]")))
    base = str(tmp_path)
    assert job.model == str(Path(base) / "model")
    assert job.data.paths == (str(Path(base) / "text"), "s3://bucket/x", "/abs")
    assert (job.output, job.checkpoints.folder) == (f"{base}/out", f"{base}/checkpoints")
    assert job.data.tokenizer == "model"


@pytest.mark.parametrize(
    ("good", "bad", "words"),
    [
        (
            "bandwidth_gbps: 1",
            "bandwidth_gbps: .nan",
            "bandwidth_gbps: input should be a finite number, not nan",
        ),
        ("round_trip_ms: 20", "round_trip_ms: 20\n    loss: 1", "loss: input should be less than 1, not 1"),
        ("owner: o", "owner: 上海", "owner: must be a name of at most 63 letters, digits"),
        ("owner: o", "owner: o\n    storage_bytes: -1 TB", "storage_bytes: input should be"),
        ("owner: o", "owner: o\n    node_groups: x", "node_groups: must be a list, not 'x'"),
    ],
)
def test_a_pool_of_impossible_things_is_refused_in_plain_words(tmp_path, good, bad, words):
    """Also as JSON, which knows no number that is none."""
    text = POOL.replace(good, bad, 1)
    if "node_groups: x" in bad:
        text = text.replace("    node_groups:\n      - {chip: H20, nodes: 2, chips_per_node: 8}\n", "", 1)
    with pytest.raises(FileError) as refused:
        load_pool(write(tmp_path, text))
    assert words in refused.value.message
    json.dumps(refused.value.as_dict(), allow_nan=False)


def test_a_tilde_is_the_home_of_who_reads_the_file(tmp_path, monkeypatch):
    """`~/models` never becomes a folder called `~` beside the job."""
    monkeypatch.setenv("HOME", "/home/ada")
    job = load_job(write(tmp_path, JOB.replace("[text]", "[~/text, ~x, 's3://~/y']")))
    assert job.data.paths == ("/home/ada/text", f"{tmp_path}/~x", "s3://~/y")
    assert load_plan(write(tmp_path, PLAN + "model: ~/llama\n")).model == "/home/ada/llama"


@pytest.mark.parametrize("field", ["model: model", "folder: checkpoints", "output: out", "paths: [text]"])
def test_a_path_of_nothing_is_a_mistake(tmp_path, field):
    """An empty path would be the job's own folder: a result would be written among the user's files."""
    name, value = field.split(": ")
    text = JOB.replace(field, f"{name}: ['']" if value == "[text]" else f"{name}: ''")
    with pytest.raises(FileError, match=f"{name}.*at least 1 character"):
        load_job(write(tmp_path, text))


@pytest.mark.parametrize("kind", LOADERS)
def test_the_schema_names_every_top_level_field(kind):
    """`isthmus schema` describes the file form: its fields, and for a pool the short forms of links."""
    schema = json_schema(kind)
    shorthand = {"equal_replicas", "equal_stages"} if kind == "plan" else set()
    assert set(schema["properties"]) - shorthand == set(FILE_KINDS[kind].model_fields)
    if kind == "pool":
        assert {"between", "round_trip_ms", "from", "to"} <= set(schema["$defs"]["Link"]["properties"])
        assert "name" not in schema["$defs"]["NodeGroup"]["required"]


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: " + "[" * 5000 + "]" * 5000])
def test_a_file_without_end_is_a_mistake_in_the_file(tmp_path, text):
    """An anchor within itself, or nesting no person writes, is named as the file's mistake."""
    (tmp_path / "job.yaml").write_text(text)
    with pytest.raises(FileError, match="nested too deeply, or refers to itself"):
        load_job(tmp_path / "job.yaml")


def bomb(first):
    """Lines of aliases, each of which stands for nine times what the line before stands for."""
    lines = (f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in itertools.pairwise("abcdefghijklmnop"))
    return "\n".join([first, *lines])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("? [x]\n: y", "no word"),
        (bomb("b: x"), "undefined alias"),
        (bomb("a: &a [x]"), "repeats 1,000,000,000 or more values by aliases"),
        ("steps: " + "9" * 5000, "5,000 characters without quotes; 4,096 are allowed"),
        ("name: 2026-13-45", "is not YAML: .*month"),
    ],
)
def test_a_hostile_file_is_a_mistake_in_the_file(tmp_path, text, message):
    """Aliases that stand for a billion values, and numbers and dates that have no value, end as an error."""
    with pytest.raises(FileError, match=message):
        load_job(write(tmp_path, text))
