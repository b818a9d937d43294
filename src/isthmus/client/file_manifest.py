"""The files of a model or data set: their sizes and digests, from a folder or a URL, and their upload to a URL.

`fsspec` opens URLs other than `http` and `https`; the user installs its package for the scheme (`s3fs`, `gcsfs`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import httpx
from pydantic import TypeAdapter, ValidationError

from isthmus.core.catalogue import MAX_FILES, FileManifest, ManifestFile, SourceUrl
from isthmus.core.errors import InputError, UnavailableError

_BLOCK_BYTES = 1 << 20
_HTTP = ("http://", "https://")
_SOURCE: TypeAdapter[str] = TypeAdapter(SourceUrl)

OnFile = Callable[[str], None]
"""Called with the path of each file before it is read."""


def read_source(text: str) -> str:
    """Return a valid source URL; raise `InputError` for any other text."""
    try:
        return _SOURCE.validate_python(text)
    except ValidationError as error:
        raise InputError(error.errors()[0]["msg"].removeprefix("Value error, ")) from error


def folder_manifest(folder: Path, on_file: OnFile = lambda _: None) -> FileManifest:
    """Return the manifest of the visible files of `folder`; raise `InputError` if it cannot be one."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder", hint="give the folder that holds the files")
    paths = sorted(_visible_files(folder))
    if not paths or len(paths) > MAX_FILES:
        raise InputError(
            f"{folder} has {len(paths)} visible files; a version has 1 to {MAX_FILES}",
            hint="pack small files into larger ones, or add a folder for each part",
        )
    found = []
    for path in paths:
        on_file(path)
        with (folder / path).open("rb") as stream:
            found.append(_describe(path, stream))
    return _manifest(found)


def remote_manifest(source: str, files: Sequence[str], on_file: OnFile = lambda _: None) -> FileManifest:
    """Return the manifest of `files` at the URL `source`, reading each once; without `files`, of all that it lists.

    Raises `InputError` if the URL cannot list files (`http`), `UnavailableError` if it cannot be read.
    """
    if source.startswith(_HTTP):
        if not files:
            raise InputError(
                f"{source} cannot list its files", hint="name them with --file, or give a folder and --at URL"
            )
        return _http_manifest(source, sorted(set(files)), on_file)
    with _remote_errors(source):
        system, root = _open_url(source)
        paths = sorted(set(files)) or _remote_files(system, root)
        if len(paths) > MAX_FILES:
            raise InputError(f"{source} has {len(paths)} files; a version has at most {MAX_FILES}")
        found = []
        for path in paths:
            on_file(path)
            with system.open(f"{root}/{path}", "rb") as stream:
                found.append(_describe(path, stream))
    return _manifest(found)


def upload_folder(folder: Path, manifest: FileManifest, target: str, on_file: OnFile = lambda _: None) -> None:
    """Copy the files of `manifest` from `folder` to the URL `target`, which is this version's own.

    Files of the right size that an interrupted upload has left there are kept; sites check the digest of each.
    Raises `UnavailableError`.
    """
    if target.startswith(_HTTP):
        raise InputError(f"{target}: files cannot be uploaded by HTTP", hint="give a URL such as s3://BUCKET/FOLDER")
    with _remote_errors(target):
        system, root = _open_url(target)
        for file in manifest.files:
            place = f"{root}/{file.path}"
            if system.exists(place) and system.size(place) == file.num_bytes:
                continue
            on_file(file.path)
            system.makedirs(place.rpartition("/")[0], exist_ok=True)
            system.put_file(str(folder / file.path), place)


def _visible_files(folder: Path) -> Iterator[str]:
    for here, folders, names in os.walk(folder):
        folders[:] = [one for one in folders if not one.startswith(".")]
        for name in names:
            file = Path(here, name)
            if not name.startswith(".") and file.is_file():
                yield file.relative_to(folder).as_posix()


def _remote_files(system: Any, root: str) -> list[str]:
    paths = [str(path)[len(root) :].lstrip("/") for path in system.find(root)]
    found = sorted(path for path in paths if path and not any(part.startswith(".") for part in path.split("/")))
    if not found:
        raise InputError(f"{root} has no files", hint="give the URL of the folder that holds them")
    return found


def _http_manifest(source: str, files: Sequence[str], on_file: OnFile) -> FileManifest:
    found = []
    with httpx.Client(follow_redirects=True, timeout=httpx.Timeout(30, connect=10)) as client:
        for path in files:
            on_file(path)
            digest, num_bytes, url = hashlib.sha256(), 0, f"{source}/{quote(path)}"
            try:
                with client.stream("GET", url, headers={"Accept-Encoding": "identity"}) as answer:
                    if answer.status_code != httpx.codes.OK:
                        raise UnavailableError(f"{url} answered {answer.status_code} {answer.reason_phrase}")
                    for block in answer.iter_bytes(_BLOCK_BYTES):
                        digest.update(block)
                        num_bytes += len(block)
            except httpx.HTTPError as error:
                raise UnavailableError(f"{url}: {error or type(error).__name__}") from error
            found.append({"path": path, "num_bytes": num_bytes, "sha256": digest.hexdigest()})
    return _manifest(found)


def _describe(path: str, stream: BinaryIO) -> dict[str, object]:
    digest, num_bytes = hashlib.sha256(), 0
    while block := stream.read(_BLOCK_BYTES):
        digest.update(block)
        num_bytes += len(block)
    return {"path": path, "num_bytes": num_bytes, "sha256": digest.hexdigest()}


def _manifest(files: Sequence[dict[str, object]]) -> FileManifest:
    try:
        return FileManifest(files=tuple(ManifestFile.model_validate(one) for one in files))
    except ValidationError as error:
        raise InputError(error.errors()[0]["msg"].removeprefix("Value error, "), hint="rename the file") from error


def _open_url(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it."""
    try:
        import fsspec
    except ImportError:
        raise InputError(f"{url} needs fsspec, which is not installed", hint="pip install fsspec") from None
    system, root = fsspec.core.url_to_fs(url)
    return system, str(root).rstrip("/")


@contextmanager
def _remote_errors(url: str) -> Iterator[None]:
    """Turn what a file system raises into an error of ours."""
    try:
        yield
    except (ImportError, ValueError) as error:
        scheme = url.partition("://")[0]
        raise InputError(f"{url}: {error}", hint=f"install the fsspec package for '{scheme}'") from error
    except OSError as error:
        raise UnavailableError(f"{url}: {error}", hint="check the URL and your credentials for it") from error
