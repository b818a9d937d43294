"""The parsers of what schedulers, nodes, images, prices, weights and sequences bring, fuzzed as all others are.

What a program of the site prints (Slurm) and a server of it answers (Kubernetes) is text of its users in part.
"""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from isthmus.agent.adapters.kubernetes.kubernetes_objects import parse_node, parse_pod
from isthmus.agent.adapters.kubernetes.resource_slices import parse_claim, parse_slice
from isthmus.agent.adapters.ray.holder_record import read_record
from isthmus.agent.adapters.slurm.slurm_output import parse_allocation, parse_boot_time, parse_jobs, parse_nodes
from isthmus.agent.containers.read_images import read_images
from isthmus.agent.containers.site_runtime import read_registration
from isthmus.agent.courier.courier_frames import FrameError, read_frame
from isthmus.agent.courier.courier_link import read_ticket
from isthmus.core.errors import FileError, InputError, UnavailableError
from isthmus.core.files.user_files import load_site, load_stack, load_tariff
from isthmus.core.messages.switch_keys import read_switch_secret
from isthmus.serve.sequence_file import unpack_sequence
from isthmus.switch.job_keys import read_job_keys
from isthmus.weights import DeltaError, apply_delta
from isthmus.weights.weights_file import parse_header
from tests.agent.test_images import write_layout
from tests.attack.fuzzing import Fuzz, Parser, at, fuzz_parser, user_file
from tests.kubernetes.samples import node, pod
from tests.kubernetes.test_resource_slices import claim_of, slice_of
from tests.serve.test_sequence_file import ARITHMETIC, SHAPE, packed
from tests.slurm.test_slurm_output import JOBS, NODE
from tests.weights.test_delta_files import versions, write_delta

pytestmark = pytest.mark.attack

CARDS = ("example.com/h20",)


def printed(parse: Callable[[str], object], seed: str) -> Parser:
    """Return the parser of what a program prints."""
    return Parser(lambda data, _: parse(data.decode("utf-8", "replace")), seed.encode(), (UnavailableError,))


def answered(parse: Callable[[Any], object], seed: dict[str, Any]) -> Parser:
    """Return the parser of an object of the API server; what is no JSON object is refused before it."""

    def parse_object(data: bytes, _: Path) -> object:
        item = json.loads(data)
        return parse(item) if isinstance(item, dict) else None

    errors = (UnavailableError, ValueError, RecursionError)
    return Parser(parse_object, json.dumps(seed).encode(), errors)


def received(data: bytes, _: Path) -> object:
    """Read a frame of the courier from a connection that brings `data` and ends."""
    stream = io.BytesIO(data)

    def receive(count: int) -> bytes:
        found = stream.read(count)
        if len(found) < count:
            raise ConnectionResetError
        return found

    return read_frame(receive)


def image_index(data: bytes, folder: Path) -> object:
    """Read a layout of images whose index is `data`."""
    write_layout(folder)
    (folder / "index.json").write_bytes(data)
    return read_images(folder)


def secret_file(read: Callable[[Path], object], seed: bytes) -> Parser:
    """Return the parser of a file that only its owner may read."""

    def parse(data: bytes, folder: Path) -> object:
        file = folder / "keys"
        file.write_bytes(data)
        file.chmod(0o600)
        return read(file)

    return Parser(parse, seed, (FileError,))


def delta(data: bytes, folder: Path) -> object:
    """Apply a delta of weights whose bytes are `data`."""
    if not (folder / "old.safetensors").exists():
        versions(folder, 2_000)
    (folder / "delta").write_bytes(data)
    try:
        return apply_delta(folder / "old.safetensors", folder / "delta", folder / "out")
    finally:
        (folder / "out").unlink(missing_ok=True)


def a_delta(folder: Path) -> bytes:
    """Return a valid delta."""
    write_delta(*versions(folder, 2_000), folder / "good")
    return (folder / "good").read_bytes()


FRAME_HEAD = b'{"kind": "data", "name": "log", "at": 3}'
HEADER = b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
ALLOCATION = "JobId=7 NodeList=a1  Nodes=a1 CPU_IDs=0-1 Mem=0 GRES=gpu:h20:2(IDX:0-1)"
TARIFF = b"currency: EUR\nprices: [{cluster: a, node_group: g, per_chip_hour: 1.5, hours: 08:00-20:00}]\n"
SITE = b"kind: slurm\nnode_groups: [{name: h20, partition: normal, resource: gpu}]\n"

PARSERS: dict[str, Parser] = {
    "jobs of Slurm": printed(parse_jobs, "\n".join(JOBS)),
    "nodes of Slurm": printed(parse_nodes, NODE.format("IDLE")),
    "cards of Slurm": printed(partial(parse_allocation, resource="gpu:h20"), ALLOCATION),
    "start of Slurm": printed(parse_boot_time, "BOOT_TIME               = 2026-01-01T00:00:00\n"),
    "pod": answered(partial(parse_pod, resources=CARDS), pod("a", 2, "n")),
    "node": answered(partial(parse_node, resources=CARDS), node("n")),
    "slice of devices": answered(parse_slice, slice_of("n", 2)),
    "claim of devices": answered(parse_claim, claim_of("c", "n", 1)),
    "record of a holder": Parser(
        at("record", lambda f: read_record(f / "record")), b'{"key": "0"}', (ValidationError,)
    ),
    "frame of the courier": Parser(
        received, struct.pack("!II", len(FRAME_HEAD), 3) + FRAME_HEAD + b"abc", (FrameError, ConnectionResetError)
    ),
    "ticket of the courier": Parser(
        at("t", lambda f: read_ticket(f / "t")),
        json.dumps({"token": "00" * 32, "port": 1, "address": "h", "certificate": "c"}).encode(),
        (ValueError, LookupError, TypeError, RecursionError),
    ),
    "index of images": Parser(image_index, b'{"manifests": [{"digest": "sha256:0", "size": 3}]}', (FileError,)),
    "registration of code": Parser(
        at("code.yaml", read_registration), b"name: x\nversion: '1'\nbase: isthmus\n", (FileError,)
    ),
    "tariff": user_file(load_tariff, TARIFF),
    "site": user_file(load_site, SITE),
    "stack": user_file(load_stack, b"name: x\n"),
    "keys of a switch": secret_file(read_job_keys, b"job-1 " + b"00" * 32 + b"\n"),
    "secret of a switch": secret_file(read_switch_secret, b"00" * 32),
    "header of weights": Parser(
        lambda data, _: parse_header(struct.pack("<Q", len(data)) + data, 8 + len(data) + 8, "x"), HEADER, (DeltaError,)
    ),
    "sequence": Parser(
        lambda data, _: unpack_sequence(
            data, arithmetic=ARITHMETIC, max_tokens=20, row_shape=SHAPE, dtype=torch.float32
        ),
        packed()[0],
        (InputError,),
    ),
}


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_of_a_site_ends_with_a_value_or_its_own_error(name: str, tmp_path: Path, fuzz: Fuzz) -> None:
    """No other exception, no more than a bounded time for an input, and bounded memory over all of them."""
    fuzz_parser(PARSERS[name], tmp_path, fuzz)


def test_a_delta_of_weights_ends_with_a_file_or_its_own_error(tmp_path: Path, fuzz: Fuzz) -> None:
    """Cut, lengthened, altered or any bytes at all; nothing but a whole file is left."""
    fuzz_parser(Parser(delta, a_delta(tmp_path), (DeltaError,)), tmp_path, fuzz)
