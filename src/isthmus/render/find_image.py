"""`find_image`: the image of a site that fits a part, by name, chip, driver, framework, library and labels."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from isthmus.core.errors import InputError
from isthmus.render.blueprint import Blueprint
from isthmus.render.image import Image

_NUMBERS = re.compile(r"\d+")
_COMPARISONS: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_MOST_REASONS = 5


def find_image(images: Sequence[Image], blueprint: Blueprint) -> Image:
    """Return the newest of `images` that fits `blueprint` (`cross-domain-pooling.txt` 4.1.2 (2)).

    The answer depends on the driver that the site has now, so a part is matched again at each start. Raises
    `InputError` that says, for the images nearest to fitting, what they lack.
    """
    named = [image for image in images if _is_named(image, blueprint.runtime.image)]
    if not named:
        raise _unknown_name(images, blueprint)
    fitting = [image for image in named if not any(_misfits(image, blueprint))]
    if not fitting:
        reasons = [f"{image.reference}: {', '.join(_misfits(image, blueprint))}" for image in named]
        reasons.sort(key=lambda text: (text.count(","), text))
        rest = len(reasons) - _MOST_REASONS
        more = f"; and {rest} more" if rest > 0 else ""
        raise InputError(
            f"cluster '{blueprint.cluster}' has no image for {blueprint.chip}: "
            + "; ".join(reasons[:_MOST_REASONS])
            + more,
            hint=_near_label(named, blueprint.runtime.labels)
            or "build one with `isthmus images build`, or ask the owner of the site",
        )
    return max(fitting, key=lambda image: (_numbers(image.version), image.version, image.created, image.digest))


def _is_named(image: Image, wanted: str | None) -> bool:
    return wanted is None or wanted in (image.name, image.reference)


def _unknown_name(images: Sequence[Image], blueprint: Blueprint) -> InputError:
    wanted = blueprint.runtime.image
    if wanted is None:
        return InputError(f"cluster '{blueprint.cluster}' has no images", hint="build one with `isthmus images build`")
    known = sorted({image.name for image in images} | {image.reference for image in images})
    near = difflib.get_close_matches(wanted, known, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"its images: {', '.join(known[:_MOST_REASONS]) or 'none'}"
    return InputError(f"runtime.image: cluster '{blueprint.cluster}' has no image '{wanted}'", hint=hint)


def _near_label(images: Sequence[Image], wanted: Mapping[str, str]) -> str | None:
    """Return the label of an image that the job may have meant: a name like its own, else a value like its own."""
    known: dict[str, set[str]] = {}
    for image in images:
        for name, value in image.labels.items():
            known.setdefault(name, set()).add(value)
    for name, value in wanted.items():
        near = difflib.get_close_matches(name, known, n=1) if name not in known else []
        if near:
            return f"runtime.labels: did you mean '{near[0]}'?"
        near = difflib.get_close_matches(value, known.get(name, ()), n=1) if value not in known.get(name, ()) else []
        if near:
            return f"runtime.labels.{name}: did you mean '{near[0]}'?"
    return None


def _misfits(image: Image, blueprint: Blueprint) -> Iterator[str]:
    """Yield what keeps `image` from running the part."""
    facts, runtime = image.facts, blueprint.runtime
    if facts.chips and blueprint.chip not in facts.chips:
        yield f"made for {', '.join(facts.chips)}"
    if not driver_fits(facts.drivers, blueprint.driver):
        yield f"needs a driver {facts.drivers}, the site has {blueprint.driver or 'an unknown one'}"
    if facts.framework != blueprint.framework:
        yield f"framework {facts.framework}, not {blueprint.framework}"
    if facts.code == "own" and runtime.code is None:
        yield "needs the user's code (runtime.code)"
    if facts.code != "own" and runtime.code is not None:
        yield "brings its own program, so it takes no runtime.code"
    if runtime.library is not None and runtime.library not in facts.libraries and facts.library_file is None:
        has = ", ".join(facts.libraries) or "none"
        yield f"no library {runtime.library} (it has {has}) and no library_file to replace"
    for name, value in runtime.labels.items():
        if image.labels.get(name) != value:
            yield f"label {name}: wanted {value!r}, has {image.labels.get(name)!r}"


def driver_fits(drivers: str, version: str) -> bool:
    """Return whether `version` is in the range `drivers`, such as `>=535.54,<560`; an unknown one only fits any."""
    if not drivers:
        return True
    if not _NUMBERS.search(version):
        return False
    return all(_holds(condition, _numbers(version)) for condition in drivers.split(","))


def _holds(condition: str, version: tuple[int, ...]) -> bool:
    sign = condition[:2] if condition[:2] in _COMPARISONS else condition[:1]
    limit = _numbers(condition[len(sign) :])
    length = max(len(limit), len(version))
    return _COMPARISONS[sign](_padded(version, length), _padded(limit, length))


def _padded(version: tuple[int, ...], length: int) -> tuple[int, ...]:
    return version + (0,) * (length - len(version))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in _NUMBERS.findall(version)[:8])
