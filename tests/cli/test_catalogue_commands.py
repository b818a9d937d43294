"""`isthmus models` and `isthmus data` against the real REST interface, with files of this machine."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from isthmus.cli import main
from isthmus.cli.environment.cli_environment import CliEnvironment
from isthmus.client.client import Client
from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.core.job import DataConfig
from tests.attack.conftest import server
from tests.control.serving import job
from tests.control.test_server_api import Server

__all__ = ["server"]
Run = Callable[..., tuple[int, str]]
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4, "hidden_size": 8, "vocab_size": 300,
    "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16,
}  # fmt: skip


@pytest.fixture
def run(server: Server) -> Run:
    """Run a command line as a user; return its status and output."""

    def run_as(*arguments: str, user: str = "ann") -> tuple[int, str]:
        env = CliEnvironment(
            variables={"ISTHMUS_SERVER": "http://127.0.0.1:1", "ISTHMUS_TOKEN": user},
            stdout=io.StringIO(), stderr=io.StringIO(), transport=forwarded(server), now=lambda: 2000.0,
        )  # fmt: skip
        status = main(list(arguments), env=env)
        return status, env.stdout.getvalue() + env.stderr.getvalue()  # type: ignore[attr-defined]

    return run_as


def forwarded(to: Server) -> httpx.MockTransport:
    """A transport that hands requests to the application in this process."""

    def answer(request: httpx.Request) -> httpx.Response:
        head = {name: value for name, value in request.headers.items() if name != "host"}
        found = to.http.request(
            request.method, str(request.url.copy_with(host="testserver")), content=request.content, headers=head
        )
        return httpx.Response(found.status_code, content=found.content, headers=found.headers)

    return httpx.MockTransport(answer)


def text_folder(place: Path) -> Path:
    """A folder with two visible files and one hidden."""
    (place / "part").mkdir(parents=True)
    (place / "part" / "b.txt").write_text("second")
    (place / "a.txt").write_text("first")
    (place / ".cache").write_text("hidden")
    return place


def test_a_folder_is_uploaded_once_and_listed(tmp_path: Path, run: Run) -> None:
    """Each version gets a folder of its own at the target; hidden files stay here."""
    folder, target = text_folder(tmp_path / "wiki"), f"file://{tmp_path}/shared/wiki"
    status, text = run("data", "add", "wiki", str(folder), "--upload", target)
    assert status == 0, text
    (version,) = (tmp_path / "shared" / "wiki").iterdir()
    assert f"catalogue:wiki@{version.name}" in text
    assert {file.name for file in version.rglob("*") if file.is_file()} == {"a.txt", "b.txt"}
    status, text = run("data", "list")
    assert "ann/wiki" in text
    assert "none yet" in text
    shown = json.loads(run("data", "show", "wiki", "--json")[1])
    assert shown["versions"][0]["source"] == f"{target}/{version.name}"
    assert shown["versions"][0]["num_bytes"] == len("first") + len("second")
    assert run("models", "list", "--json")[1].strip() == "[]"


def test_files_at_a_url_are_read_once_for_their_digests(tmp_path: Path, run: Run) -> None:
    """The version is the same as that of an equal folder."""
    folder = text_folder(tmp_path / "wiki")
    local = json.loads(run("data", "add", "one", str(folder), "--at", "https://host/wiki", "--json")[1])
    remote = json.loads(run("data", "add", "two", f"file://{folder}", "--json")[1])
    assert local["versions"][0]["version"] == remote["versions"][0]["version"]
    assert local["versions"][0]["source"] == "https://host/wiki"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("data", "add", "x", "FOLDER"), "--upload URL"),
        (("data", "add", "x", "FOLDER", "--at", "https://h/x", "--upload", "s3://b"), "--upload URL"),
        (("data", "add", "x", "https://host/x"), "--file"),
        (("data", "add", "x", "FOLDER", "--at", "https://u:p@h/x"), "password"),
        (("data", "add", "x", "FOLDER", "--upload", "https://h/x"), "cannot be uploaded by HTTP"),
        (("data", "add", "x", "FOLDER/none", "--at", "https://h/x"), "not a folder"),
        (("models", "add", "x", "FOLDER", "--at", "https://h/x"), "no model at"),
        (("data", "show", "none"), "no entry 'none'"),
        (("data", "remove", "none"), "no entry 'none'"),
        (("data", "show", "a b"), "names no entry"),
    ],
)  # fmt: skip
def test_a_wrong_use_says_what_to_give(tmp_path: Path, run: Run, arguments: tuple[str, ...], text: str) -> None:
    """Nothing is added."""
    folder = text_folder(tmp_path / "wiki")
    status, shown = run(*(word.replace("FOLDER", str(folder)) for word in arguments))
    assert status != 0
    assert text in shown
    assert json.loads(run("data", "list", "--json")[1]) == []


def test_a_grant_lets_another_user_name_the_entry(tmp_path: Path, run: Run) -> None:
    """Without an owner, a word finds the only entry of that name; one's own comes first."""
    folder = text_folder(tmp_path / "wiki")
    run("data", "add", "wiki", str(folder), "--at", "https://host/wiki")
    assert "no entry" in run("data", "show", "wiki", user="bob")[1]
    assert "granted to bob" in run("data", "grant", "wiki", "bob")[1]
    assert "data ann/wiki" in run("data", "show", "wiki", user="bob")[1]
    assert "granted to" not in run("data", "show", "wiki", user="bob")[1]
    run("data", "add", "wiki", str(folder), "--at", "https://host/of-bob", user="bob")
    assert "data bob/wiki" in run("data", "show", "wiki", user="bob")[1]
    assert run("data", "remove", "ann/wiki", "--all", user="bob")[0] != 0
    assert "give a version, or --all" in run("data", "remove", "wiki")[1]
    assert run("data", "remove", "wiki", "--all")[0] == 0
    assert "is granted to" in run("data", "grant", "bob/wiki", "ann", user="bob")[1]


def test_a_job_takes_its_models_dimensions_and_tokenizer_from_the_catalogue(
    tmp_path: Path, run: Run, server: Server
) -> None:
    """No file of the model is on this machine; without a tokenizer in the version it is `bytes`."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert run("models", "add", "tiny", str(folder), "--at", "https://host/tiny")[0] == 0
    (folder / "tokenizer.json").write_text("{}")
    assert run("models", "add", "other", str(folder), "--at", "https://host/other")[0] == 0
    with Client("http://127.0.0.1:1", token_file=token(tmp_path), transport=forwarded(server)) as client:
        for name, tokenizer in (("tiny", "bytes"), ("other", "catalogue:ann/other@")):
            wish = job(model=f"catalogue:{name}", data=DataConfig(paths=("/data/text",)))
            seen = client.submit(wish).job
            assert seen.model.startswith(f"catalogue:ann/{name}@")
            assert seen.data.tokenizer.startswith(tokenizer)
    jobs = Coordinator.replay(event for _, event in server.store.events(0)).state.jobs.values()
    assert [one.submission.model.num_layers for one in jobs] == [4, 4]


def token(folder: Path) -> Path:
    """A file with ann's token."""
    file = folder / "ann.token"
    file.write_text("ann")
    file.chmod(0o600)
    return file
