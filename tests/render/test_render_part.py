"""A part is rendered into one image and settings of five classes, each with its origin."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from isthmus.core.errors import InputError
from isthmus.render import CodeRegistration, SiteRuntime, Template, render_part, settings_document
from isthmus.render.setting import SETTING_CLASSES
from tests.render.samples import make_blueprint, make_image, make_job

OWN_CODE = {"code": "/home/code"}
REGISTRATION = CodeRegistration.model_validate(
    {
        "command": ["python3", "train.py"],
        "parameters": {
            "learning_rate": {"passed_as": "argument", "name": "--lr"},
            "steps": {"passed_as": "environment", "name": "MAX_STEPS"},
            "data": {"passed_as": "file", "name": "data_files"},
        },
    }
)


def make_template(name: str = "site", **changes) -> Template:
    setting = {"name": "OMP_NUM_THREADS", "value": "${num_chips}", "passed_as": "environment"}
    return Template.model_validate({"name": name, "class": "training", "settings": [setting], **changes})


def test_system_code_reads_all_training_parameters_from_its_file() -> None:
    part = render_part(make_blueprint(job=make_job(learning_rate=0.001)), SiteRuntime([make_image()]))
    assert part.of("file")["spec.json#learning_rate"] == "0.001"
    assert part.of("file")["spec.json#data"] == "/data/a,/data/b"
    assert part.arguments == ()


def test_own_code_takes_what_it_registered() -> None:
    blueprint = make_blueprint(job=make_job(OWN_CODE, learning_rate=0.001))
    part = render_part(blueprint, SiteRuntime([make_image(code="own")]), registration=REGISTRATION)
    assert part.command == ("python3", "train.py")
    assert part.arguments == ("--lr", "0.001")
    assert part.of("environment") == {"MAX_STEPS": "10"}
    assert part.of("file") == {"parameters.json#data_files": "/data/a,/data/b"}
    assert part.mounts["/code"] == ("/home/code", False)


def test_parameter_that_own_code_does_not_take() -> None:
    blueprint = make_blueprint(job=make_job(OWN_CODE, weight_decay=0.5))
    with pytest.raises(InputError, match="takes no weight_decay"):
        render_part(blueprint, SiteRuntime([make_image(code="own")]), registration=REGISTRATION)


def test_parameter_that_no_job_has() -> None:
    image = make_image(code="built_in", parameters={"learning_rat": {"passed_as": "argument", "name": "--lr"}})
    with pytest.raises(InputError, match="unknown parameter 'learning_rat'") as caught:
        render_part(make_blueprint(), SiteRuntime([image]))
    assert caught.value.hint == "did you mean 'learning_rate'?"


def test_built_in_program_takes_what_the_image_lists() -> None:
    image = make_image(
        code="built_in", command=["/train"], parameters={"steps": {"passed_as": "argument", "name": "--steps"}}
    )
    part = render_part(make_blueprint(), SiteRuntime([image]))
    assert (*part.command, *part.arguments) == ("/train", "--steps", "10")


def test_resources_are_the_share_of_a_node() -> None:
    part = render_part(make_blueprint(), SiteRuntime([make_image()]))
    assert (part.cpu_cores, part.memory_bytes) == (16.0, 64 << 30)
    unlimited = render_part(make_blueprint(cpus=None, memory_bytes=None), SiteRuntime([make_image()]))
    assert (unlimited.cpu_cores, unlimited.memory_bytes) == (None, None)


def test_paths_are_mounted_and_only_the_job_writes_its_own() -> None:
    mounts = render_part(make_blueprint(), SiteRuntime([make_image()])).mounts
    assert mounts["/data/a"] == ("/data/a", False)
    assert mounts["/models/llama"] == ("/models/llama", False)
    assert mounts["/out/job"] == ("/out/job", True)


def test_template_adds_a_setting_from_facts() -> None:
    part = render_part(make_blueprint(), SiteRuntime([make_image()], [make_template()]))
    assert part.of("environment")["OMP_NUM_THREADS"] == "4"


@pytest.mark.parametrize("condition", [{"chips": ["910B"]}, {"networks": ["reserved"]}, {"libraries": ["hccl"]}])
def test_template_for_other_parts(condition: dict) -> None:
    part = render_part(make_blueprint(), SiteRuntime([make_image()], [make_template(**condition)]))
    assert part.of("environment") == {}


def test_template_replaces_a_limit() -> None:
    limit = {"name": "cpu.cores", "value": "2.5", "passed_as": "container"}
    template = make_template(**{"class": "resources", "settings": [limit]})
    assert render_part(make_blueprint(), SiteRuntime([make_image()], [template])).cpu_cores == 2.5


def test_setting_without_its_fact_is_left_out() -> None:
    setting = {"name": "RTT", "value": "${round_trip_ms}", "passed_as": "environment"}
    part = render_part(make_blueprint(), SiteRuntime([make_image()], [make_template(settings=[setting])]))
    assert part.of("environment") == {}


def test_choice_of_the_job_stands_above_a_template() -> None:
    setting = {"name": "NCCL_DEBUG", "value": "WARN", "passed_as": "environment"}
    site = SiteRuntime([make_image()], [make_template(settings=[setting])])
    part = render_part(make_blueprint({"communication": {"NCCL_DEBUG": "INFO"}}), site)
    assert part.of("environment") == {"NCCL_DEBUG": "INFO"}


def test_two_templates_that_set_one_value() -> None:
    site = SiteRuntime([make_image()], [make_template("first"), make_template("second")])
    with pytest.raises(InputError, match="templates 'first' and 'second' both set environment 'OMP_NUM_THREADS'"):
        render_part(make_blueprint(), site)


@pytest.mark.parametrize("value", ["${chp}", "$", "${chip.__class__}", "${CHIP}"])
def test_template_with_an_unknown_fact(value: str) -> None:
    with pytest.raises(ValidationError, match=r"unknown fact|starts a fact"):
        make_template(settings=[{"name": "A", "value": value, "passed_as": "environment"}])


@pytest.mark.parametrize("value", ["one\ntwo", "nul\0"])
def test_values_are_one_line(value: str) -> None:
    with pytest.raises(ValidationError):
        make_template(settings=[{"name": "A", "value": value, "passed_as": "environment"}])


def test_document_lists_every_setting_with_its_origin() -> None:
    part = render_part(make_blueprint(), SiteRuntime([make_image()], [make_template()]))
    document = json.loads(settings_document(part.settings))
    assert {tuple(one) for one in document} == {("name", "class", "value", "passed_as", "from")}
    places = [SETTING_CLASSES.index(one["class"]) for one in document]
    assert places == sorted(places)
    assert {"name": "cpu.cores", "class": "resources", "value": "16", "passed_as": "container",
            "from": "node group h20"} in document  # fmt: skip
