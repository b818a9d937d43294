"""The communication library follows job, image and network; its parameters follow job and wide-area path."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import InputError
from isthmus.render import Image
from isthmus.render.communication_settings import (
    MAX_BUFFER_BYTES,
    MIN_BUFFER_BYTES,
    MIN_MESSAGE_BYTES,
    communication_settings,
    reserved_sizes,
)
from tests.render.samples import BEST_EFFORT, RESERVED, make_blueprint, make_image

SELECT = {"passed_as": "environment", "name": "COMM_LIBRARY"}


def settings(image: Image, runtime: dict | None = None, files: dict[str, str] | None = None, **changes) -> dict:
    made = communication_settings(image, make_blueprint(runtime, **changes), files or {})
    return {(one.setting_class, one.passed_as, one.name): one.value for one in made}


def test_library_of_the_job_is_selected_as_the_image_says() -> None:
    image = make_image(libraries={"nccl": {}, "hccl": {"select": SELECT}})
    assert settings(image, {"library": "hccl"}) == {("library", "environment", "COMM_LIBRARY"): "hccl"}


def test_library_that_the_image_lacks_replaces_its_file() -> None:
    image = make_image(library_file="/usr/lib/libnccl.so.2")
    made = settings(image, {"library": "ccl"}, {"ccl": "/srv/libccl.so"})
    assert made == {("library", "container", "/usr/lib/libnccl.so.2"): "/srv/libccl.so:ro"}


@pytest.mark.parametrize(("library_file", "reason"), [(None, "no library_file"), ("/l.so", "no file of ccl")])
def test_library_that_can_neither_be_selected_nor_replaced(library_file: str | None, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        settings(make_image(library_file=library_file), {"library": "ccl"})


def test_within_a_cluster_the_library_of_the_chip_and_its_defaults() -> None:
    image = make_image(libraries={"isthmus": {"select": SELECT}, "nccl": {"select": SELECT}})
    assert settings(image) == {("library", "environment", "COMM_LIBRARY"): "nccl"}


def test_across_sites_a_library_that_is_made_for_it() -> None:
    image = make_image(libraries={"nccl": {"select": SELECT}, "isthmus": {"select": SELECT}})
    assert settings(image, path=BEST_EFFORT) == {
        ("library", "environment", "COMM_LIBRARY"): "isthmus",
        ("communication", "file", "spec.json#congestion_control"): "bbr",
    }


def test_across_sites_without_such_a_library() -> None:
    with pytest.raises(InputError, match="no communication library for links between clusters"):
        settings(make_image(libraries={"nccl": {}}), path=RESERVED)


def test_reserved_path_sizes_buffers_and_messages_by_its_round_trip() -> None:
    image = make_image(libraries={"nccl": {"across_sites": True}})  # 40 ms at 10 Gbit/s: 50 MB on the way
    assert settings(image, path=RESERVED) == {
        ("communication", "environment", "NCCL_BUFFSIZE"): str(128 << 20),
        ("communication", "environment", "NCCL_P2P_NET_CHUNKSIZE"): str(16 << 20),
    }


def test_reserved_path_of_the_own_library_takes_connections() -> None:
    assert settings(make_image(), path=RESERVED) == {("communication", "file", "spec.json#lanes"): "32"}


def test_best_effort_path_takes_the_proxy() -> None:
    proxy = {"passed_as": "environment", "name": "NCCL_NET"}
    image = make_image(libraries={"nccl": {"across_sites": True, "proxy": proxy, "proxy_value": "isthmus"}})
    assert settings(image, path=BEST_EFFORT) == {("communication", "environment", "NCCL_NET"): "isthmus"}


def test_parameters_of_the_job_stand_alone() -> None:
    made = settings(make_image(), {"communication": {"NCCL_DEBUG": "INFO"}}, path=RESERVED)
    assert made == {("communication", "environment", "NCCL_DEBUG"): "INFO"}


@given(st.integers(0, 1 << 40))
def test_sizes_of_a_reserved_path(in_flight_bytes: int) -> None:
    buffer_bytes, message_bytes = reserved_sizes(in_flight_bytes)
    assert MIN_BUFFER_BYTES <= buffer_bytes <= MAX_BUFFER_BYTES
    assert buffer_bytes >= min(2 * in_flight_bytes, MAX_BUFFER_BYTES)
    assert buffer_bytes <= max(4 * in_flight_bytes, MIN_BUFFER_BYTES)
    assert MIN_MESSAGE_BYTES <= message_bytes < buffer_bytes
    assert buffer_bytes % message_bytes == 0
