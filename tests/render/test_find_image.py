"""An image fits by chip, driver, framework, library and labels; the newest that fits is taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.core.errors import InputError
from isthmus.render import find_image
from isthmus.render.find_image import driver_fits
from tests.render.samples import make_blueprint, make_image


def test_newest_version_that_fits() -> None:
    images = [make_image(version=version) for version in ("1.9", "1.10", "1.2")]
    assert find_image(images, make_blueprint()).version == "1.10"


def test_version_that_the_job_names() -> None:
    images = [make_image(version=version) for version in ("1.9", "1.10")]
    assert find_image(images, make_blueprint({"image": "isthmus:1.9"})).version == "1.9"


def test_new_driver_matches_another_image() -> None:
    images = [make_image(version="2", drivers=">=550"), make_image(version="1", drivers=">=535,<550")]
    assert find_image(images, make_blueprint(driver="535.104.05")).version == "1"
    assert find_image(images, make_blueprint(driver="550.54.14")).version == "2"


@pytest.mark.parametrize(
    ("facts", "blueprint", "reason"),
    [
        ({"chips": ["910B"]}, {}, "made for 910B"),
        ({"drivers": ">=550"}, {}, "needs a driver >=550, the site has 535.104.05"),
        ({"drivers": ">=550"}, {"driver": ""}, "an unknown one"),
        ({"framework": "megatron"}, {}, "framework megatron, not isthmus"),
        ({"code": "own"}, {}, "needs the user's code"),
        ({}, {"runtime": {"code": "/home/code"}}, "takes no runtime.code"),
        ({}, {"runtime": {"library": "hccl"}}, "no library hccl (it has isthmus, nccl)"),
        ({}, {"runtime": {"labels": {"torch": "2.13"}}}, "label torch: wanted '2.13', has None"),
    ],
)
def test_reason_when_no_image_fits(facts: dict, blueprint: dict, reason: str) -> None:
    with pytest.raises(InputError, match="has no image for H20") as caught:
        find_image([make_image(**facts)], make_blueprint(**blueprint))
    assert reason in caught.value.message


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(InputError) as caught:
        find_image([make_image("megatron")], make_blueprint({"image": "megatronn"}))
    assert caught.value.hint == "did you mean 'megatron'?"


def test_site_without_images() -> None:
    with pytest.raises(InputError, match="has no images"):
        find_image([], make_blueprint())


@pytest.mark.parametrize(
    ("drivers", "version", "fits"),
    [
        ("", "", True),
        (">=535", "535.0.1", True),
        (">=535.1", "535", False),
        ("==535", "535.0", True),
        (">=1,<2", "1.9.9", True),
        (">=1,<2", "2", False),
        (">1", "1.0", False),
        (">=1", "rc", False),
    ],
)
def test_driver_ranges(drivers: str, version: str, fits: bool) -> None:
    assert driver_fits(drivers, version) is fits


@pytest.mark.parametrize(
    ("labels", "hint"),
    [
        ({"torhc": "2.13"}, "runtime.labels: did you mean 'torch'?"),
        ({"torch": "2.31"}, "runtime.labels.torch: did you"),
    ],
)
def test_a_label_that_no_image_has_comes_with_the_nearest(labels: dict[str, str], hint: str) -> None:
    with pytest.raises(InputError) as caught:
        find_image([make_image(labels={"torch": "2.13"})], make_blueprint({"labels": labels}))
    assert (caught.value.hint or "").startswith(hint)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=4), st.lists(st.integers(0, 99), min_size=1, max_size=4))
def test_of_two_versions_one_is_below_or_they_are_equal(first: list[int], second: list[int]) -> None:
    a, b = ".".join(map(str, first)), ".".join(map(str, second))
    assert driver_fits(f">={b}", a) is not driver_fits(f"<{b}", a)
    assert driver_fits(f"<={b}", a) is not driver_fits(f">{b}", a)
    assert driver_fits(f"=={b}", a) is (driver_fits(f">={b}", a) and driver_fits(f"<={b}", a))
