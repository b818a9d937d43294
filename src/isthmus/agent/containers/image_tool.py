"""`build_image` and `unpack_image`: what Isthmus asks of `umoci` (https://umo.ci)."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from isthmus.agent.containers.read_images import TITLE_LABEL, VERSION_LABEL, read_images, reference_of
from isthmus.core.errors import InputError, UnavailableError
from isthmus.render import CODE_MOUNT, IMAGE_LABEL, Image, ImageFacts

TOOL = "umoci"
_TIMEOUT_S = 1800.0
_MAX_ERROR_CHARS = 500


def build_image(
    layout: Path,
    name: str,
    version: str,
    facts: ImageFacts,
    *,
    base: str | None = None,
    code: Path | None = None,
    labels: Mapping[str, str] | None = None,
) -> Image:
    """Add an image to `layout`, which is made if it is missing: `base` of the same layout, else an empty one, plus
    the folder `code` at `/code`.

    Raises `InputError` if the version exists or `base` does not, `UnavailableError` if `umoci` fails.
    """
    if not (layout / "index.json").exists():
        layout.parent.mkdir(parents=True, exist_ok=True)
        _run("init", "--layout", str(layout))
    known = {image.reference: image for image in read_images(layout)}
    if f"{name}:{version}" in known:
        raise InputError(f"image {name}:{version} exists", hint="choose another --version")
    tag = f"{name.replace('/', '-')}-{version}"
    if base is None:
        _run("new", "--image", f"{layout}:{tag}")
    else:
        if base not in known:
            raise InputError(f"no image {base} in {layout}", hint=f"its images: {', '.join(known) or 'none'}")
        _run("tag", "--image", f"{layout}:{reference_of(layout, known[base])}", tag)
    try:
        if code is not None:
            _run("insert", *_rootless(), "--image", f"{layout}:{tag}", str(code), CODE_MOUNT)
        values = {
            TITLE_LABEL: name,
            VERSION_LABEL: version,
            IMAGE_LABEL: facts.model_dump_json(exclude_unset=True),
            **(labels or {}),
        }
        options = [text for key, value in values.items() for text in ("--config.label", f"{key}={value}")]
        _run("config", "--image", f"{layout}:{tag}", *options)
    except BaseException:
        _run("rm", "--image", f"{layout}:{tag}")
        raise
    return next(image for image in read_images(layout) if image.reference == f"{name}:{version}")


def unpack_image(layout: Path, image: Image, store: Path) -> Path:
    """Return the root folder of `image` in `store`, unpacked once per digest; umoci verifies every layer."""
    place = store / image.digest.removeprefix("sha256:")
    if not place.exists():
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=store, prefix=".unpacking-"))
        try:
            tag = reference_of(layout, image)
            _run("unpack", *_rootless(), "--image", f"{layout}:{tag}", str(made / "bundle"))
            (made / "bundle" / "rootfs").chmod(0o755)
            if not place.exists():  # an agent has one thread that starts workers
                (made / "bundle").rename(place)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return place / "rootfs"


def _rootless() -> tuple[str, ...]:
    return () if os.geteuid() == 0 else ("--rootless",)


def _run(*arguments: str) -> None:
    tool = shutil.which(TOOL)
    if tool is None:
        raise UnavailableError(f"'{TOOL}' is missing", hint=f"install it: sudo apt-get install -y {TOOL}")
    try:
        done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"{TOOL} {arguments[0]} took longer than {_TIMEOUT_S:g} s") from error
    if done.returncode:
        raise UnavailableError(f"{TOOL} {arguments[0]}: {done.stderr.strip()[-_MAX_ERROR_CHARS:] or done.returncode}")
