"""Every parser of files and messages from others, fuzzed: it ends with a value or with its own documented error.

Inputs are drawn from nothing, and from a valid one that is changed: bytes replaced, cut or repeated, and any value of
a document replaced by any other. A run tries a few of each; `--whole` tries many.
"""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
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
from isthmus.core.messages.api_views import JobView, Submission
from isthmus.core.messages.run_lease import read_run_lease
from isthmus.core.messages.worker_folder import WorkerFolder
from isthmus.core.runs.run_folder import CLAIM_FILE, CLAIM_FOLDER, read_claim
from isthmus.train.checkpoint.checkpoint_folder import read_layout, read_manifest
from isthmus.train.checkpoint.layout.dcp_layout import read_dcp_layout
from isthmus.train.checkpoint.write_checkpoint import read_rank_part
from tests.cli.samples import make_plan, make_view
from tests.control.samples import cluster, submission
from tests.control.serving import POOL, report
from tests.control.test_server_api import Server

pytestmark = pytest.mark.attack

LIMIT_CPU_S = 2.0
MAX_GROWTH_BYTES = 400 * 2**20
OLD = Path(__file__).parent.parent / "train" / "data" / "checkpoint-v2" / "step-00000003"

numbers = st.integers() | st.sampled_from([2**31, 2**63, -(2**63), 2**64, 10**300, -1, 0]) | st.floats()
words = st.text(max_size=20) | st.sampled_from(["../x", "/etc/passwd", "a" * 5000, "\x00", "\ud800", "NaN", "²", "٣"])
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | numbers | words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4),
    max_leaves=12,
)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value of a document."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*at, key))


def replaced(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    """Return the document with another value at a path."""
    if not at:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = replaced(value[at[0]], at[1:], new)
    return copy


@st.composite
def changed_bytes(draw: st.DrawFn, seed: bytes) -> bytes:
    """Return `seed` with some bytes replaced, cut, or repeated."""
    begin = draw(st.integers(0, len(seed)))
    end = min(len(seed), begin + draw(st.integers(0, 40)))
    middle = draw(st.binary(max_size=40) | st.just(seed[begin:end] * draw(st.sampled_from([0, 2, 300]))))
    return seed[:begin] + middle + (b"" if draw(st.booleans()) and draw(st.booleans()) else seed[end:])


def inputs(seed: bytes) -> st.SearchStrategy[bytes]:
    """Return what a parser of `seed` is given."""
    drawn = st.binary(max_size=300) | changed_bytes(seed)
    deep = st.sampled_from(
        [b"[" * 100_000, b'{"a":' * 100_000, b"[" * 900 + b"]" * 900, b"", b"null", b"[]", b"1" * 9999]
    )
    whole_values = values.map(lambda value: json.dumps(value).encode("utf-8", "surrogatepass"))
    try:
        document = json.loads(seed)
    except ValueError:
        return drawn | deep | whole_values
    paths = list(places(document))
    mutants = st.tuples(st.sampled_from(paths), values).map(
        lambda change: json.dumps(replaced(document, *change)).encode("utf-8", "surrogatepass")
    )
    return drawn | deep | whole_values | mutants | mutants


def of(model: BaseModel) -> bytes:
    """Return a valid message."""
    return model.model_dump_json(by_alias=True).encode()


@dataclass(frozen=True)
class Parser:
    """How bytes are parsed in a new folder, a valid input, and the errors that the parser documents."""

    parse: Callable[[bytes, Path], object]
    seed: bytes
    errors: tuple[type[Exception], ...]


def at(name: str, read: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    """Return a parser of a file `name` of a folder; `read` gets the folder's path."""

    def parse(data: bytes, folder: Path) -> object:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        return read(folder)

    return parse


def worker(name: str, read: Callable[[WorkerFolder], object]) -> Parser:
    """Return the parser of a file of a worker's folder."""
    return Parser(at(name, lambda folder: read(WorkerFolder(folder))), b'{"version": 1}', (InputError, ProtocolError))


def user_file(load: Callable[[Path], object], seed: bytes) -> Parser:
    """Return the parser of a YAML file."""
    return Parser(at("file.yaml", lambda folder: load(folder / "file.yaml")), seed, (FileError,))


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
def test_a_parser_ends_with_a_value_or_its_own_error(name: str, tmp_path: Path, whole: bool) -> None:
    """No other exception, no more than a bounded time for an input, and bounded memory over all of them."""
    parser = PARSERS[name]

    @settings(max_examples=3000 if whole else 25, suppress_health_check=list(HealthCheck), database=None)
    @given(data=inputs(parser.seed))
    def parse_any(data: bytes) -> None:
        began_s = time.process_time()
        with suppress(parser.errors):
            parser.parse(data, tmp_path)
        assert time.process_time() - began_s < LIMIT_CPU_S

    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    parse_any()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) * 1024 < MAX_GROWTH_BYTES


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
def test_no_body_ends_a_request_with_a_server_error(path: str, server: Server, whole: bool) -> None:
    """Depth, numbers, encodings and types that no client sends: an answer below 500 with the cause, or success."""
    token, seed = REQUESTS[path]

    @settings(max_examples=1000 if whole else 15, suppress_health_check=list(HealthCheck), database=None)
    @given(data=inputs(seed))
    def post_any(data: bytes) -> None:
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        answer = server.http.post(path, content=data, headers=headers)
        assert answer.status_code < 500
        assert answer.status_code not in (401, 404, 405)

    post_any()
