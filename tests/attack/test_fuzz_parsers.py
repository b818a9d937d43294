"""Every parser of files and messages from others, fuzzed: it ends with a value or with its own documented error.

Inputs are drawn from nothing, and from a valid one that is changed: bytes replaced, cut or repeated, and any value of
a document replaced by any other. A run tries a few of each; `--whole` tries many.
"""

from __future__ import annotations

import hashlib
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from isthmus.agent.adapters.local_queue_file import LocalQueueFile
from isthmus.agent.files.file_transfer import read_sources
from isthmus.agent.service.agent_state_folder import AgentStateFolder, read_local_jobs, read_routes
from isthmus.agent.service.part_table import PartTable
from isthmus.agent.service.worker_event_tails import WorkerEventTails
from isthmus.control.server.backup_file import verify_file
from isthmus.control.server.log_end_file import LogEndFile
from isthmus.control.state.coordinator_config import CoordinatorConfig
from isthmus.control.state.events import JobSubmitted, decode_event, encode_event
from isthmus.control.store.snapshot_codec import restore_state
from isthmus.control.store.snapshot_file import SnapshotFile
from isthmus.control.store.store_interface import MemoryStore
from isthmus.core.errors import FileError, InputError, IsthmusError, ProtocolError, UnavailableError
from isthmus.core.files.user_files import load_job, load_plan, load_policy, load_pool
from isthmus.core.messages.agent_messages import AgentOrders, AgentReport
from isthmus.core.messages.run_lease import read_run_lease
from isthmus.core.messages.worker_folder import WorkerFolder
from isthmus.core.runs.run_folder import CLAIM_FILE, CLAIM_FOLDER, read_claim
from isthmus.core.views.api_views import JobView, Submission
from isthmus.train.checkpoint.checkpoint_folder import read_layout, read_manifest
from isthmus.train.checkpoint.layout.dcp_layout import read_dcp_layout
from isthmus.train.checkpoint.write_checkpoint import read_rank_part
from tests.attack.fuzzing import Fuzz, Parser, at, fuzz_parser, inputs, of, user_file
from tests.cli.samples import make_plan, make_view
from tests.control.samples import cluster, submission
from tests.control.serving import POOL, report
from tests.control.test_server_api import Server

pytestmark = pytest.mark.attack

OLD = Path(__file__).parent.parent / "train" / "data" / "checkpoint-v2" / "step-00000003"


def worker(name: str, read: Callable[[WorkerFolder], object]) -> Parser:
    """Return the parser of a file of a worker's folder."""
    return Parser(at(name, lambda folder: read(WorkerFolder(folder))), b'{"version": 1}', (InputError, ProtocolError))


def body(model: type[BaseModel], seed: BaseModel) -> Parser:
    """Return the parser of a body or message."""
    return Parser(lambda data, _: model.model_validate_json(data), of(seed), (ValidationError,))


def old_layout(data: bytes, folder: Path) -> object:
    """Read the layout of a checkpoint of an earlier release whose `.metadata` is `data`."""
    shutil.copytree(OLD, folder / "c", dirs_exist_ok=True)
    (folder / "c" / ".metadata").write_bytes(data)
    return read_dcp_layout(folder / "c")


def old_part(data: bytes, folder: Path) -> object:
    """Read the layout of a checkpoint of an earlier release whose first part is `data`."""
    shutil.copytree(OLD, folder / "c", dirs_exist_ok=True)
    (folder / "c" / "__0_0.distcp").write_bytes(data)
    return read_dcp_layout(folder / "c")


def stored_event(data: bytes, folder: Path) -> object:
    """Check a backup whose one event has the bytes as its body, number or hash, in turn."""
    file = folder / "backup.db"
    file.unlink(missing_ok=True)
    text = data.decode("utf-8", "replace")
    with closing(sqlite3.connect(file)) as db:
        db.execute("CREATE TABLE events (number, body, hash)")
        db.execute("CREATE TABLE identity (store)")
        db.execute("INSERT INTO identity VALUES ('s')")
        for row in ((1, text, data), (2, data, text), (3, text, 10**12), (text, text, None), (4, None, 1.5)):
            db.execute("INSERT INTO events VALUES (?, ?, ?)", row)
        db.commit()
    return verify_file(file)


def end_of_log(data: bytes, folder: Path) -> object:
    """Read the note of the log's end with a checksum that fits: the attacker can compute it as well."""
    text = data.decode("ascii", "replace")
    (folder / "log-end").write_bytes(f"{text} {hashlib.sha256(text.encode()).hexdigest()[:16]}\n".encode())
    return LogEndFile(folder)


def snapshot_file(data: bytes, folder: Path) -> object:
    """Load a snapshot whose first line is `data`."""
    file = SnapshotFile(folder, code="c")
    file.path.write_bytes(data)
    return file.load(MemoryStore(), CoordinatorConfig())


SNAPSHOT_HEAD = b'{"code": "c", "event": "", "number": 0, "sha256": "%s"}' % hashlib.sha256(b"").hexdigest().encode()
EVENT = JobSubmitted(now_s=1.0, job_id="j", user="u", submission=submission())
EVENT_LINE = b'{"time_s": 1.0, "rank": 0, "kind": "resumed", "detail": "x", "step": 3, "seconds": 1.0}\n'
LAYOUT = (
    b'{"version": 1, "shards": [{"name": "w", "dtype": "float32", "shape": [2], "offsets": [0], "sizes": [2], '
    b'"file": "0.safetensors", "start_byte": 0}]}'
)
MANIFEST = (OLD / "manifest.json").read_bytes()

PARSERS: dict[str, Parser] = {
    "submission": body(Submission, submission()),
    "agent report": body(AgentReport, report()),
    "agent orders": body(AgentOrders, AgentOrders(fence=1, parts=())),
    "answer of a server": body(JobView, make_view()),
    "event": Parser(
        lambda data, _: decode_event(data.decode("utf-8", "replace")), encode_event(EVENT).encode(), (ProtocolError,)
    ),
    "snapshot": Parser(lambda data, _: restore_state(data), b"[[1]]", (ValueError, TypeError, LookupError)),
    "snapshot file": Parser(snapshot_file, SNAPSHOT_HEAD, ()),
    "backup": Parser(stored_event, encode_event(EVENT).encode(), (IsthmusError,)),
    "backup file": Parser(
        at("b.db", lambda folder: verify_file(folder / "b.db")), b"SQLite format 3\0", (IsthmusError,)
    ),
    "end of the log": Parser(
        at("log-end", LogEndFile), b"isthmus-log-end-1 s 00000000000000000001 00 11", (FileError,)
    ),
    "job file": user_file(load_job, of(make_view().job)),
    "pool file": user_file(load_pool, of(POOL)),
    "plan file": user_file(load_plan, of(make_plan())),
    "policy file": user_file(load_policy, b"pool_share: 0.5\nusers: [a]\nstorage: {roots: [{path: /x}]}\n"),
    "parts of an agent": Parser(
        at("parts.json", lambda f: PartTable(f).load()), b'{"fence": 1, "parts": []}', (FileError,)
    ),
    "routes": Parser(at("r", lambda f: read_routes(f / "r", "a")), b'{"a": {"b": "h:1"}}', (FileError,)),
    "sources": Parser(at("s", lambda f: read_sources(f / "s")), b'{"a": "/x", "b": ["rsync"]}', (FileError,)),
    "queue of a site": Parser(at("queue", lambda f: LocalQueueFile(f / "queue").entries()), b"a\nj/1\n", ()),
    "local job": Parser(
        at("local/x/job.json", lambda f: read_local_jobs(AgentStateFolder(f), cluster("a"))),
        b'{"command": ["x"], "node_group": "g"}',
        (),
    ),
    "run lease": Parser(at("l", lambda f: read_run_lease(f / "l")), b'{"boot": "b", "lease_s": 1, "until_s": 1}', ()),
    "worker events": Parser(at("events.jsonl", lambda f: WorkerEventTails().newest([f])), EVENT_LINE * 2, ()),
    "worker spec": worker(WorkerFolder(Path()).spec_path.name, WorkerFolder.read_spec),
    "worker address": worker(WorkerFolder(Path()).checkin_path.name, WorkerFolder.read_checkin),
    "rank map": worker(WorkerFolder(Path()).rank_map_path.name, WorkerFolder.read_rank_map),
    "worker wait": worker(WorkerFolder(Path()).wait_path.name, WorkerFolder.read_wait),
    "verified checkpoint": worker(
        WorkerFolder(Path()).verified_checkpoint_path.name, WorkerFolder.read_verified_checkpoint
    ),
    "exit status": worker(WorkerFolder(Path()).exit_path.name, WorkerFolder.read_exit),
    "claim": Parser(at(f"{CLAIM_FOLDER}/{CLAIM_FILE}", read_claim), b'{"job": "j"}', (InputError,)),
    "manifest": Parser(at("manifest.json", read_manifest), MANIFEST, (UnavailableError, ProtocolError)),
    "layout": Parser(
        at("layout.json", lambda f: read_layout(f, read_manifest(OLD).model_copy(update={"version": 3}))),
        LAYOUT,
        (UnavailableError,),
    ),
    "part of a rank": Parser(
        at("0.part", lambda f: read_rank_part(f, 0)), b'{"files": [], "shards": []}', (UnavailableError, OSError)
    ),
    "old layout": Parser(old_layout, (OLD / ".metadata").read_bytes(), (UnavailableError,)),
    "old part": Parser(old_part, (OLD / "__0_0.distcp").read_bytes(), (UnavailableError,)),
}


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_ends_with_a_value_or_its_own_error(name: str, tmp_path: Path, fuzz: Fuzz) -> None:
    """No other exception, no more than a bounded time for an input, and bounded memory over all of them."""
    fuzz_parser(PARSERS[name], tmp_path, fuzz)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server in this process."""
    found = Server()
    found.shell.start()
    with found.http:
        yield found
    found.shell.close()


REQUESTS = {
    "/v1/jobs": ("ann", of(submission())),
    "/v1/jobs:dry-run": ("ann", of(submission())),
    "/v1/agents/east/sync": ("owner-east", of(report())),
    "/v1/tokens": ("root", b'{"role": "user", "name": "x"}'),
}


@pytest.mark.parametrize("path", REQUESTS)
def test_no_body_ends_a_request_with_a_server_error(path: str, server: Server, fuzz: Fuzz) -> None:
    """Depth, numbers, encodings and types that no client sends: an answer below 500 with the cause, or success."""
    token, seed = REQUESTS[path]

    def post_any(data: bytes) -> None:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        answer = server.http.post(path, content=data, headers=headers)
        assert answer.status_code < 500
        assert answer.status_code not in (401, 404, 405)

    fuzz(inputs(seed), post_any, examples=15, whole_examples=1000)
