"""Run a worker in a container on a node that shares no files with its agent: `node_container.py RUNNER FOLDER`.

`container.json` in the worker's folder, which the courier brought, says what the agent has rendered: the image by its
digest, the OCI configuration without what only the node knows, and where the node has images. This process unpacks the
image once into the node's store, completes the configuration, and becomes `RUNNER` (`container_start.py`).

    STORE/DIGEST/         an unpacked image, whose layers umoci has verified
    STORE/bundles/NAME/   the bundle of one container: removed by `node_container.py --delete RUNNER ...`
    STORE/runtime/        what runc keeps

It needs root, `runc`, `umoci` and the standard library. A failure ends it with status 126 and the reason.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

CONTAINER_FILE = "container.json"
FAILED_STATUS = 126
DELETE = "--delete"

_SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt", "/nix", "/run/systemd/resolve")
_NEVER_MOUNTED = ("/proc", "/sys", "/dev")
_REFERENCE = "org.opencontainers.image.ref.name"
_MAX_INDEX_BYTES = 4 << 20
"""Largest index of an image layout that is read: a user brings the image."""
_UNPACK_TIMEOUT_S, _COPY_TIMEOUT_S, _ASK_TIMEOUT_S, _DELETE_TIMEOUT_S = 1800.0, 600.0, 60.0, 75.0


class NodeError(Exception):
    """Raised when this node cannot run the container; the text says what is missing."""


def main(arguments: Sequence[str]) -> int:
    """Make the bundle of a worker and become its runner; returns only on failure, or after `--delete`."""
    if arguments[0] == DELETE:
        runner, *container = arguments[1:]
        command = [*_python(runner), DELETE, *container]
        subprocess.run(command, check=False, timeout=_DELETE_TIMEOUT_S)  # noqa: S603 - the agent's
        shutil.rmtree(container[2], ignore_errors=True)
        return 0
    runner, folder = arguments
    try:
        asked = json.loads(Path(folder, CONTAINER_FILE).read_bytes())
        words = node_start_words(asked)
        _make_bundle(asked, Path(words[2]), Path(folder))
        os.execv(sys.executable, [*_python(runner), *words])  # noqa: S606 - the agent's runner
    except (OSError, ValueError, KeyError, TypeError, subprocess.SubprocessError, NodeError) as error:
        print(f"error: this node cannot run the worker's container: {error}", file=sys.stderr, flush=True)
    return FAILED_STATUS


def node_start_words(asked: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the arguments of `container_start` for the container that `container.json` asks for."""
    store, name = asked["store"], asked["name"]
    return (shutil.which("runc") or "runc", f"{store}/runtime", f"{store}/bundles/{name}", name)


def _python(script: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", "-B", script)


def _make_bundle(asked: Mapping[str, Any], bundle: Path, folder: Path) -> None:
    if os.geteuid() != 0:
        raise NodeError(f"it needs root, and this process has uid {os.geteuid()}")
    for tool in ("runc", "umoci"):
        if shutil.which(tool) is None:
            raise NodeError(f"'{tool}' is missing; install it: sudo apt-get install -y {tool}")
    # Step 1: the root folder: a copy of the image by links to its files, so that mounts leave no trace in it.
    root = _unpack(asked, _own_store(Path(asked["store"])))
    shutil.rmtree(bundle, ignore_errors=True)
    bundle.mkdir(mode=0o700, parents=True)
    subprocess.run(["/bin/cp", "-al", str(root), str(bundle / "rootfs")], check=True, timeout=_COPY_TIMEOUT_S)  # noqa: S603
    # Step 2: what this node adds to the configuration.
    config = asked["config"]
    config["root"]["path"] = str(bundle / "rootfs")
    process, own = config["process"], list[dict[str, Any]]()
    process["args"] = [sys.executable if word == "{python}" else word for word in process["args"]]
    variables = dict(asked["environment"])
    if asked["host_files"]:
        variables = {name: text for name, text in os.environ.items() if _is_inherited(name, asked)} | variables
        own = [_read_only(place) for place in _host_folders(asked["readable"])]
    process["env"] = [f"{name}={value}" for name, value in variables.items()]
    config["mounts"] = _placed([*config["mounts"], *own], Path(asked["store"]))
    _open_to(process["user"], folder)
    (bundle / "config.json").write_text(json.dumps(config))


def _own_store(store: Path) -> Path:
    """Return the store, made if it is missing; images of another account would be its programs run as root."""
    store.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = store.stat(follow_symlinks=False)
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise NodeError(f"{store} belongs to another account, or others may write there")
    return store


def _unpack(asked: Mapping[str, Any], store: Path) -> Path:
    """Return the root folder of the image in `store`, unpacked by the first worker that needs it."""
    place = store / str(asked["digest"]).removeprefix("sha256:")
    with place.with_suffix(".lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            tag = _tag_of(Path(asked["layout"]), asked)
            made = Path(tempfile.mkdtemp(dir=store, prefix=".unpacking-"))
            try:
                command = ["umoci", "unpack", "--image", f"{asked['layout']}:{tag}", str(made / "bundle")]
                done = subprocess.run(command, capture_output=True, text=True, timeout=_UNPACK_TIMEOUT_S, check=False)  # noqa: S603
                if done.returncode:
                    raise NodeError(f"umoci unpack: {done.stderr.strip()[-500:] or done.returncode}")
                (made / "bundle" / "rootfs").chmod(0o755)
                (made / "bundle").rename(place)
            finally:
                shutil.rmtree(made, ignore_errors=True)
    return place / "rootfs"


def _tag_of(layout: Path, asked: Mapping[str, Any]) -> str:
    """Return the tag of the image that the agent has matched, by its digest."""
    with (layout / "index.json").open("rb") as file:
        text = file.read(_MAX_INDEX_BYTES + 1)
    if len(text) > _MAX_INDEX_BYTES:
        raise NodeError(f"{layout}/index.json is larger than {_MAX_INDEX_BYTES >> 20} MiB")
    for entry in json.loads(text).get("manifests") or ():
        if entry.get("digest") == asked["digest"] and _REFERENCE in (entry.get("annotations") or {}):
            return str(entry["annotations"][_REFERENCE])
    raise NodeError(
        f"{layout} lacks image {asked['image']} of {asked['digest']}; copy the agent's folder of images here"
    )


def _is_inherited(name: str, asked: Mapping[str, Any]) -> bool:
    return name in asked["names"] or name.startswith(tuple(asked["prefixes"]))


def _host_folders(readable: Sequence[str]) -> Iterator[str]:
    """Yield what programs read on any machine, this Python with its packages, and what the owner names."""
    ask = "import json, sys; print(json.dumps([sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path]))"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, cwd="/", check=True, timeout=_ASK_TIMEOUT_S)  # noqa: S603
    for place in (*_SYSTEM_FOLDERS, *json.loads(done.stdout), *readable):
        if place.startswith("/") and Path(place).exists():
            yield from {place, os.path.realpath(place)}


def _read_only(place: str) -> dict[str, Any]:
    options = ["rbind", "nosuid", "nodev", "ro"]
    return {"destination": place, "type": "bind", "source": place, "options": options, "own": True}


def _placed(mounts: Sequence[Mapping[str, Any]], store: Path) -> list[dict[str, Any]]:
    """Return the mounts with their places at this node, in the order of their paths.

    A path of the job that is not there yet is the nearest folder above it, and one that may write there counts. The
    node's own folders come last and stay read-only. No worker sees the store of images.
    """
    system = [dict(one) for one in mounts if one["type"] != "bind"]
    found: dict[str, dict[str, Any]] = {}
    for one in mounts:
        if one["type"] != "bind":
            continue
        source, place = Path(one["source"]), one["destination"]
        if not source.exists() and str(source) == place:
            source = next(parent for parent in source.parents if parent.exists())
            place = str(source)
        if not source.exists() or place == "/":
            raise NodeError(f"{one['source']} does not exist here; create it, or its parent folder")
        real = os.path.realpath(source)
        if any(Path(real).is_relative_to(kernels) for kernels in _NEVER_MOUNTED):
            if one["destination"] == place and "ro" in one["options"]:
                continue
            raise NodeError(f"{one['source']} is a folder of the kernel")
        if Path(real).is_relative_to(store) or store.is_relative_to(real):
            raise NodeError(
                f"{one['source']} would show this node's images in {store}; set options.image_store elsewhere"
            )
        is_own = one.get("own", False)
        writes = not is_own and ("rw" in one["options"] or "rw" in found.get(place, {"options": ()})["options"])
        right = "rw" if writes else "ro"
        found[place] = {"type": "bind", "source": real, "destination": place, "options": [*one["options"][:-1], right]}
    return system + [found[place] for place in sorted(found)]


def _open_to(user: Mapping[str, Any], folder: Path) -> None:
    """Open the worker's folder to the account in the container, which may add files and cannot replace the agent's."""
    (folder / "tmp").mkdir(mode=0o700, exist_ok=True)
    if user["uid"] == os.geteuid():
        return
    for file in folder.iterdir():
        if not file.is_dir():
            os.chown(file, -1, user["gid"], follow_symlinks=False)
            file.chmod(0o640)
    os.chown(folder / "tmp", user["uid"], user["gid"])
    os.chown(folder, -1, user["gid"])
    folder.chmod(0o3770)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
