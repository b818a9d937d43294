"""Makes each mistake against a real server, as typed in a shell, and judges the answer."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks._first_hour_mistakes import JOB, MODEL, POOL, REMOVE, Mistake
from isthmus.client.api_client import ApiClient
from isthmus.core.views.api_views import JobFilter

LIMIT_S = 60.0
ISTHMUS = (sys.executable, "-m", "isthmus")


@dataclass(frozen=True)
class Answer:
    """What a mistake met: exit status, the text on both streams, and what is wrong with the refusal ("" if nothing)."""

    mistake: Mistake
    status: int
    text: str
    fault: str


@contextmanager
def running_pool(folder: Path) -> Iterator[str]:
    """Run `isthmus serve` on a free port of loopback and an agent per cluster; yield the port and end all after."""
    write_good_files(folder)
    with ExitStack() as stack:
        argv = ["serve", "--state", "server", "--pool", "pool.yaml", "--port", "0", "--json"]
        server = stack.enter_context(_background(folder, "server", argv))
        assert server.stdout is not None
        port = re.search(r":(\d+)", json.loads(server.stdout.readline())["server"])[1]  # type: ignore[index]
        for cluster in POOL["clusters"]:
            name, token = cluster["name"], folder / f"{cluster['name']}.token"
            create = ["token", "create", "--owner", cluster["owner"]]
            token.write_text(_answer(folder, port, create).stdout)
            argv = ["agent", "--pool", "pool.yaml", "--cluster", name, "--state", f"agent-{name}"]
            argv += ["--server", f"http://127.0.0.1:{port}", "--token-file", str(token)]
            stack.enter_context(_background(folder, f"agent-{name}", argv))
        yield port


@contextmanager
def _background(folder: Path, name: str, words: list[str]) -> Iterator[subprocess.Popen[str]]:
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([*ISTHMUS, *words], cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=60)


def write_good_files(folder: Path, mistake: Mistake | None = None) -> None:
    """Write pool, model, data and job, all good but for the fields and files of `mistake`."""
    changes: tuple[Mapping[str, Any], ...] = (mistake.pool, mistake.model, mistake.job) if mistake else ({}, {}, {})
    pool, model, job = (_changed(good, change) for good, change in zip((POOL, MODEL, JOB), changes, strict=True))
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "data").mkdir(exist_ok=True)
    (folder / "pool.yaml").write_text(yaml.safe_dump(pool))
    (folder / "model" / "config.json").write_text(json.dumps(model))
    (folder / "data" / "text.txt").write_text("the isthmus joins two lands by a narrow strip\n" * 200)
    (folder / "job.yaml").write_text(yaml.safe_dump(job, allow_unicode=True))
    for name, content in (mistake.files if mistake else {}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def make(mistake: Mistake, folder: Path, server: Path, port: str) -> Answer:
    """Make one mistake in `folder`, with the admin's token of the server whose folder is `server`."""
    write_good_files(folder, mistake)
    environment = os.environ | {
        "ISTHMUS_SERVER": f"http://127.0.0.1:{port}",
        "ISTHMUS_TOKEN_FILE": str(server / "server" / "admin.token"),
        "COLUMNS": "200",
    }
    words = [word.replace("PORT", port) for word in mistake.words]
    process = subprocess.Popen(
        [*ISTHMUS, *words], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    try:
        text, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        _end(process)
        text, _ = process.communicate()
        return Answer(mistake, -1, text, f"no answer in {LIMIT_S:g} s")
    return Answer(mistake, process.returncode, text, _fault(mistake, process.returncode, text, port))


def jobs_with_chips(server: Path, port: str) -> list[str]:
    """Return the jobs whose history says that sites held chips for them: no mistake may lead to one."""
    token = (server / "server" / "admin.token").read_text().strip()
    with ApiClient(f"http://127.0.0.1:{port}", token) as client:
        jobs = client.jobs(JobFilter())
        return [one.id for one in jobs if any(event.kind == "held" for event in client.history(one.id).events)]


def _answer(server: Path, port: str, words: list[str]) -> subprocess.CompletedProcess[str]:
    argv = [*ISTHMUS, *words, "--server", f"http://127.0.0.1:{port}"]
    argv += ["--token-file", str(server / "server" / "admin.token")]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=LIMIT_S)


def _fault(mistake: Mistake, status: int, text: str, port: str) -> str:
    flat = re.sub(r"[\s│]+", " ", text)
    value = mistake.value.replace("PORT", port)
    if "Traceback" in text:
        return "a traceback"
    if status == 0:
        return "accepted"
    if not re.search(value, flat):
        return f"does not name the value: /{value}/"
    if not re.search(mistake.next_step, flat):
        return f"does not say what next: /{mistake.next_step}/"
    return ""


def _changed(good: Mapping[str, Any], changes: Mapping[str, Any]) -> Any:
    document = copy.deepcopy(dict(good))
    for path, value in changes.items():
        *parents, last = (int(key) if key.isdigit() else key for key in path.split("."))
        place: Any = document
        for key in parents:
            place = place.setdefault(key, {}) if isinstance(place, dict) else place[key]
        if value is REMOVE:
            del place[last]
        else:
            place[last] = value
    return document


def _end(process: subprocess.Popen[str]) -> None:
    for child in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        child.kill()


def make_all(mistakes: tuple[Mistake, ...], folder: Path) -> tuple[list[Answer], list[str], float]:
    """Make the mistakes one after another; return their answers, the jobs that held chips, and the seconds."""
    server = folder / "server-files"
    server.mkdir(parents=True)
    begun_s = time.monotonic()
    with running_pool(server) as port:
        answers = [make(mistake, folder / f"{i:03}", server, port) for i, mistake in enumerate(mistakes)]
        return answers, jobs_with_chips(server, port), time.monotonic() - begun_s
