"""Job ids: 128 random bits behind the job's name, and the short prefixes that people get."""

from __future__ import annotations

from isthmus.client.resolve_job import select_job
from isthmus.core.runs.job_id import make_job_id, short_job_id, short_job_ids
from tests.cli.samples import make_view


def test_an_id_is_a_name_with_128_random_bits() -> None:
    """The random bytes stand in the id whole; with the longest name it still has at most 63 characters."""
    drawn = bytes(range(16))
    assert make_job_id("tiny", drawn) == "tiny-000102030405060708090a0b0c0d0e0f"
    assert len(make_job_id("n" * 63, drawn)) == 63


def test_people_get_the_shortest_prefix_that_names_one_job() -> None:
    """Eight digits, more where two ids begin alike; an id of an earlier version stays whole."""
    near, far = "a-" + "0" * 30 + "11", "a-" + "f" * 32
    twin = "a-" + "0" * 30 + "12"
    short = short_job_ids([near, twin, far, "a-3f9a2c1b", "plain"])
    assert short == {
        near: near,
        twin: twin,
        far: "a-ffffffff",
        "a-3f9a2c1b": "a-3f9a2c1b",
        "plain": "plain",
    }
    assert short_job_ids(["a-" + "0" * 10 + "1" * 22, far, "a-" + "0" * 32])["a-" + "0" * 32] == "a-" + "0" * 11
    assert short_job_id(far) == "a-ffffffff"


def test_a_printed_prefix_names_its_job() -> None:
    """What a table prints is what a command takes."""
    ids = [make_job_id("tiny", bytes([number]) * 16) for number in range(50)]
    ids += [make_job_id("tiny", bytes([1]) * 6 + bytes([number]) * 10) for number in range(2, 9)]
    views = [make_view().model_copy(update={"id": one}) for one in ids]
    for whole, short in short_job_ids(ids).items():
        assert select_job(views, short).id == whole
        assert len(short) <= len("tiny-") + 14
