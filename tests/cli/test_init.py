"""`isthmus init`: commented files that are valid and can be planned at once, from options or from answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from isthmus.core.files.user_files import load_job, load_pool
from tests.cli.fake_server import FakeServer, run

pytestmark = pytest.mark.integration

FILES = ["job.yaml", "model/config.json", "policy.yaml", "pool.yaml", "site.yaml"]
PAIR = ("--cluster", "hangzhou@zhejiang=H20:2x8", "--cluster", "nanjing=BI-V150:4x8")


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def plans_of(folder: Path) -> list[dict]:
    done = run(None, "plan", folder / "job.yaml", "--pool", folder / "pool.yaml", "--json", "--top", "1", "--runnable")
    assert done.status == 0, done.err
    return json.loads(done.out)["plans"]


@pytest.mark.parametrize("options", [(), PAIR, ("--steps", "1", "--policy", "auto")])
def test_the_files_pass_the_validators_and_can_be_planned_at_once(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Every file is of its kind, has comments, and `plan` finds a plan that runs; the site is the first cluster."""
    folder = tmp_path / "first job"
    done = run(None, "init", folder, "--json", *options)
    assert done.status == 0, done.err
    assert sorted(map(str, done.json["files"])) == sorted(str(folder / name) for name in FILES)
    assert names(folder) == FILES
    for name, kind in (("job", "job"), ("pool", "pool"), ("site", "pool"), ("policy", "policy")):
        assert run(None, "check", folder / f"{name}.yaml", "--json").json["kind"] == kind
        assert "\n  # " in (text := (folder / f"{name}.yaml").read_text()) or text.startswith("# ")
    assert load_job(folder / "job.yaml").name == "first-job"
    assert load_pool(folder / "site.yaml").clusters == load_pool(folder / "pool.yaml").clusters[:1]
    assert plans_of(folder)


def test_options_answer_the_questions(tmp_path: Path) -> None:
    """Model with its tokenizer, data, name, steps, clusters and links are in the files; paths are absolute."""
    model = tmp_path / "llama"
    model.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 300}
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    (model / "tokenizer.json").write_text("{}")
    options = ["--model", model, "--data", "text/*.txt", "--data", "s3://bucket/x", "--name", "mine", "--steps", "40"]
    done = run(None, "init", tmp_path / "out", *options, *PAIR, "--bandwidth", "2.5", "--round-trip", "8")
    assert done.status == 0, done.err
    assert f"isthmus plan {tmp_path}/out/job.yaml --pool {tmp_path}/out/pool.yaml" in done.out
    job, pool = load_job(tmp_path / "out" / "job.yaml"), load_pool(tmp_path / "out" / "pool.yaml")
    assert (job.name, job.model, job.training.steps) == ("mine", str(model), 40)
    assert job.data.tokenizer == "model"
    assert job.data.paths == (str(Path.cwd() / "text/*.txt"), "s3://bucket/x")
    assert job.training.sequence_length == 512
    assert [(one.name, one.owner) for one in pool.clusters] == [("hangzhou", "zhejiang"), ("nanjing", "nanjing")]
    link = pool.link("nanjing", "hangzhou")
    assert link is not None
    assert (link.bandwidth_gbps, link.delay_ms) == (2.5, 4)
    assert not (tmp_path / "out" / "model").exists()


def test_a_finetuning_job_reads_chats(tmp_path: Path) -> None:
    """The task sets the format of the data; it needs the user's model and data."""
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 300}
        )
    )
    model = ("--model", tmp_path / "config.json")
    assert run(None, "init", tmp_path / "a", "--task", "finetune", *model).status == 2
    assert run(None, "init", tmp_path / "b", "--task", "finetune", *model, "--data", "/chats/*.jsonl").status == 0
    job = load_job(tmp_path / "b" / "job.yaml")
    assert (job.task, job.data.format, job.data.paths) == ("finetune", "chat", ("/chats/*.jsonl",))


@pytest.mark.parametrize("name", FILES)
def test_no_file_is_overwritten(tmp_path: Path, name: str) -> None:
    """One existing file refuses all: nothing else is written, and the file keeps its content."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    done = run(None, "init", tmp_path)
    assert done.status == 6
    assert name in done.err
    assert names(tmp_path) == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_a_terminal_asks_and_asks_again(tmp_path: Path) -> None:
    """Enter takes the default; a wrong cluster or model is explained and asked again; options are not asked for."""
    typed = "\nno-such-model\n\n\nhere=H2O:1x8\nhere=H20:1x8, there=H20:1x8\n"
    done = run(None, "init", tmp_path, "--name", "given", terminal=True, typed=typed[1:])
    assert done.status == 0, done.err
    assert "Name of the job" not in done.out
    assert "did you mean 'H20'" in done.err
    assert "no-such-model" in done.err
    assert [one.name for one in load_pool(tmp_path / "pool.yaml").clusters] == ["here", "there"]
    assert plans_of(tmp_path)


def test_without_a_terminal_or_with_yes_nothing_is_asked(tmp_path: Path) -> None:
    """A script gets the defaults; so does a closed input at a terminal."""
    assert "[" not in run(None, "init", tmp_path / "a").out
    assert "Name" not in run(None, "init", tmp_path / "b", "--yes", terminal=True, typed="").out
    assert run(None, "init", tmp_path / "c", terminal=True, typed="").status == 0


HOSTILE = "a\n  - {x: 1}\n#"


@pytest.mark.parametrize(
    "options",
    [
        ("--cluster", "a=H20:0x8"), ("--cluster", "a=H20:9999999x8"), ("--cluster", "a"), ("--cluster", ""),
        ("--cluster", "a=NoChip:1x1"), ("--cluster", f"{HOSTILE}=H20:1x1"), ("--cluster", f"a@{HOSTILE}=H20:1x1"),
        ("--cluster", "a=H20:1x1", "--cluster", "a=H20:1x1"), ("--name", HOSTILE), ("--name", "$name"),
        ("--model", "missing"), ("--steps", "0"), (*PAIR, "--bandwidth", "nan"), (*PAIR, "--bandwidth", "inf"),
        ("--task", "continue"), ("--task", "finetune", "--model", "missing"),
    ],
)  # fmt: skip
def test_an_invalid_answer_writes_nothing(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Whatever is given becomes a value, never structure; a value that is not valid is named, with status 2."""
    done = run(None, "init", tmp_path / "out", *options)
    assert done.status == 2, done.out
    assert not (tmp_path / "out").exists()


def test_a_path_is_a_value_whatever_it_contains(tmp_path: Path) -> None:
    """Quotes, braces, line ends and template signs in a path stay in that path."""
    path = tmp_path / 'da"ta: {$name}\n- #x'
    assert run(None, "init", tmp_path / "out", "--data", path).status == 0
    document = yaml.safe_load((tmp_path / "out" / "job.yaml").read_text())
    assert document["data"]["paths"] == [str(path)]


def test_the_commands_that_follow_exist(tmp_path: Path) -> None:
    """Each printed command is one of the command line."""
    done = run(FakeServer(), "init", tmp_path / "out", "--json")
    for line in done.json["next"]:
        assert run(None, line.split()[1], "--help").status == 0
    assert [line.split()[1] for line in done.json["next"]] == ["plan", "serve", "token", "agent", "submit", "doctor"]
