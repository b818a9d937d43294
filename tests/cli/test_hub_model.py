"""Rules of models by name: cache first, then the Hub, a pinned commit, safe files only, and a next step otherwise."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.client.hub_model import fetch_hub_model
from isthmus.core.errors import ModelError
from isthmus.core.files.user_files import load_job
from isthmus.core.model import HubName

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 300}
FILES = {"config.json": json.dumps(CONFIG), "tokenizer.json": "{}", "model.safetensors": "weights"}
NAME = HubName(repository="org/tiny")
JOB = (
    "name: a\nmodel: {model}\noutput: out\ndata: {{paths: [text]}}\n"
    "training: {{steps: 3, sequence_length: 8, global_batch_size: 2}}\ncheckpoints: {{folder: ck}}\n"
)


def cached(cache: Path, files: dict[str, str]) -> Path:
    """Lay out a model as huggingface_hub does: blobs, a snapshot of links to them, a ref to its commit."""
    root = cache / "models--org--tiny"
    snapshot = root / "snapshots" / COMMIT
    for folder in (root / "blobs", root / "refs", snapshot):
        folder.mkdir(parents=True)
    (root / "refs/main").write_text(COMMIT)
    for number, (name, text) in enumerate(files.items()):
        (root / "blobs" / f"{number:064x}").write_text(text)
        (snapshot / name).symlink_to(f"../../blobs/{number:064x}")
    return snapshot


@pytest.fixture
def closed_port() -> Iterator[str]:
    """An address on which nothing listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture
def silent_port() -> Iterator[str]:
    """An address that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_a_cached_model_is_taken_without_the_hub(tmp_path: Path, closed_port: str, revision: str | None) -> None:
    """The cache comes first; the source names the commit, whatever was asked for."""
    snapshot = cached(tmp_path, FILES)
    name = HubName(repository="org/tiny", revision=revision)
    found = fetch_hub_model(name, needs_weights=True, cache=tmp_path, endpoint=closed_port)
    assert (found.folder, found.source) == (snapshot, f"org/tiny@{COMMIT}")


def test_an_unreachable_hub_is_answered_in_bounded_time(tmp_path: Path, closed_port: str, silent_port: str) -> None:
    """Refused or silent, the error names the model and says how to give a folder."""
    for endpoint in (closed_port, silent_port):
        with pytest.raises(ModelError, match="no model org/tiny in the cache, and the Hub cannot be asked") as caught:
            fetch_hub_model(NAME, needs_weights=False, cache=tmp_path, endpoint=endpoint, timeout_s=0.3)
        assert "hf download org/tiny --local-dir FOLDER" in str(caught.value.hint)


def test_a_cached_model_without_tokenizer_serves_where_the_hub_cannot_be_asked(
    tmp_path: Path, closed_port: str
) -> None:
    """The Hub might have a tokenizer that the cache lacks; unreachable, the cache is what there is."""
    snapshot = cached(tmp_path, {"config.json": FILES["config.json"]})
    found = fetch_hub_model(NAME, needs_weights=False, cache=tmp_path, endpoint=closed_port)
    assert found.folder == snapshot


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"pytorch_model.bin": "pickle"}, "neither model.safetensors nor"),
        ({INDEX: json.dumps({"weight_map": {"a": "model-1.safetensors"}})}, "no model-1.safetensors"),
        ({INDEX: json.dumps({"weight_map": {"a": "../../x.safetensors"}})}, "no safetensors file of the folder"),
        ({INDEX: json.dumps({"weight_map": {"a": "pytorch_model.bin"}})}, "no safetensors file of the folder"),
        ({INDEX: json.dumps({"weight_map": {"a": 7}})}, "malformed"),
        ({INDEX: "[" * 100_000}, "malformed"),
    ],
)
def test_weights_that_are_missing_or_unsafe_are_not_taken(
    tmp_path: Path, closed_port: str, files: dict[str, str], reason: str
) -> None:
    """To go on training a model needs all its safetensors; pickled weights and paths elsewhere never count."""
    cached(tmp_path, {"config.json": FILES["config.json"], "tokenizer.json": "{}"} | files)
    with pytest.raises(ModelError, match=reason):
        fetch_hub_model(NAME, needs_weights=True, cache=tmp_path, endpoint=closed_port)
    assert fetch_hub_model(NAME, needs_weights=False, cache=tmp_path, endpoint=closed_port).source.endswith(COMMIT)


class FakeHub(http.server.BaseHTTPRequestHandler):
    """The few addresses of the Hub that a download uses, with files that must not be fetched among them."""

    files = FILES | {"pytorch_model.bin": "pickle", "modeling_tiny.py": "code", "original/x.safetensors": "other"}

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path.startswith("/api/models/org/tiny/tree/"):
            rows = [
                {"type": "file", "path": name, "size": len(text), "oid": f"{number:040x}"}
                for number, (name, text) in enumerate(self.files.items())
            ]
            return self.answer(json.dumps(rows).encode())
        if path.startswith("/api/models/org/tiny"):
            siblings = [{"rfilename": name} for name in self.files]
            info = {"id": "org/tiny", "modelId": "org/tiny", "sha": COMMIT, "siblings": siblings}
            return self.answer(json.dumps(info).encode())
        name = path.removeprefix(f"/org/tiny/resolve/{COMMIT}/")
        self.server.fetched.append(name)  # type: ignore[attr-defined]
        return self.answer(self.files[name].encode())

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hash(self.path) & (1 << 64) - 1:064x}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@pytest.mark.parametrize(
    ("needs_weights", "expected"),
    [(True, {"config.json", "tokenizer.json", "model.safetensors"}), (False, {"config.json", "tokenizer.json"})],
)
def test_only_safe_files_are_downloaded(tmp_path: Path, needs_weights: bool, expected: set[str]) -> None:
    """Configuration, tokenizer and safetensors of the top folder; never pickles or code; weights only if needed."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    server.fetched = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        found = fetch_hub_model(NAME, needs_weights=needs_weights, cache=tmp_path, endpoint=endpoint)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert found.source == f"org/tiny@{COMMIT}"
    assert {file.name for file in found.folder.rglob("*") if file.is_file()} == expected
    assert set(server.fetched) == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "repository", "revision"),
    [
        ("org/tiny", "org/tiny", None),
        ("hf://org/tiny@v1.0", "org/tiny", "v1.0"),
        ("org/tiny@refs/pr/1", "org/tiny", "refs/pr/1"),
    ],
)
def test_names_of_models(text: str, repository: str, revision: str | None) -> None:
    """`ORG/NAME`, with a revision after `@`."""
    assert HubName.parse(text) == HubName(repository=repository, revision=revision)


@pytest.mark.parametrize(
    "text",
    [
        "tiny",
        "a/b/c",
        "./a",
        "../a",
        "/a/b",
        "~/a",
        "org/",
        "a/..",
        "a/b@../../x",
        "a--b/c",
        "a/b@",
        "s3://a/b",
        "a/b\n",
    ],
)
def test_what_is_no_name_is_a_path(text: str) -> None:
    """Paths and URLs are not looked up in the Hub, and no name leaves the cache's folder."""
    assert HubName.parse(text) is None


def test_a_folder_beside_the_job_wins_over_a_name(tmp_path: Path) -> None:
    """`models/tiny` is the folder if it exists, and a name of the Hub otherwise; `hf://` always is a name."""
    file = tmp_path / "job.yaml"
    file.write_text(JOB.format(model="models/tiny"))
    assert load_job(file).model == "hf://models/tiny"
    (tmp_path / "models/tiny").mkdir(parents=True)
    assert load_job(file).model == str(tmp_path / "models/tiny")
    file.write_text(JOB.format(model="hf://models/tiny"))
    assert load_job(file).model == "hf://models/tiny"


@pytest.mark.slow
def test_commands_honour_the_variables_of_huggingface(tmp_path: Path) -> None:
    """With HF_HOME, and HF_HUB_OFFLINE, `check` takes the cached model, and says what to do without one."""
    snapshot = cached(tmp_path / "home/hub", FILES)
    file = tmp_path / "job.yaml"
    environ = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}

    def check(model: str) -> subprocess.CompletedProcess[str]:
        file.write_text(JOB.format(model=model))
        command = [sys.executable, "-m", "isthmus", "check", str(file), "--json"]
        return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)

    assert json.loads(check("org/tiny").stdout)["tokenizer"] == str(snapshot / "tokenizer.json")
    missing = check("org/other")
    assert missing.returncode == 2
    assert f"no folder {tmp_path}/org/other; no model org/other in the cache" in missing.stdout
    assert "hf download org/other --local-dir FOLDER" in missing.stdout
