"""`WatchedList`: the objects of a collection, listed once and then kept up to date by a watch.

The list is read whole, page by page; the watch goes on from its version. After a broken watch the next one begins where
the last event or bookmark was, and after 410 (the server has compacted that version away) the whole list is read again.
An event is applied by the object's id, so that one which comes twice changes nothing.
"""

from __future__ import annotations

import json
import queue
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from isthmus.agent.adapters.kubernetes.kubernetes_client import ExpiredVersionError, KubernetesClient
from isthmus.core.errors import IsthmusError, UnavailableError

_T = TypeVar("_T")
_PAGE = 500
_MAX_PAGES = 2_000
_MAX_LISTS = 3
_WATCH_LIMIT_S = 60.0
_MAX_WAITING_EVENTS = 20_000
_CHANGES = ("ADDED", "MODIFIED")


class ObjectCache(Generic[_T]):
    """The objects of a collection by id, as `parse` reads them (None: of no interest), and the version of all."""

    def __init__(self, parse: Callable[[Mapping[str, Any]], _T | None]) -> None:
        self._parse = parse
        self.objects: dict[str, _T] = {}
        self.version = ""

    def replace(self, items: list[Any], version: str) -> None:
        """Take a full list."""
        found: dict[str, _T] = {}
        for item in items:
            key, parsed = _key_of(item), self._parse(item)
            if parsed is not None:
                found[key] = parsed
        self.objects, self.version = found, version

    def apply(self, line: bytes) -> None:
        """Apply a line of a watch; raise `ExpiredVersionError` for 410, `UnavailableError` for what cannot be read."""
        try:
            event = json.loads(line)
            kind, item = event["type"], event["object"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UnavailableError(f"an event of a watch cannot be read: {len(line)} bytes") from error
        if kind == "ERROR":
            code = item.get("code") if isinstance(item, dict) else None
            raise (ExpiredVersionError if code == 410 else UnavailableError)(f"the watch has ended with {code}")
        version = _metadata(item).get("resourceVersion")
        if not isinstance(version, str) or not version:
            raise UnavailableError("an event of a watch has no version")
        if kind in _CHANGES:
            key, parsed = _key_of(item), self._parse(item)
            if parsed is None:
                self.objects.pop(key, None)
            else:
                self.objects[key] = parsed
        elif kind == "DELETED":
            self.objects.pop(_key_of(item), None)
        elif kind != "BOOKMARK":
            raise UnavailableError("an event of a watch is of an unknown type")
        self.version = version


class WatchedList(Generic[_T]):
    """The collection `path`, whose list has the kind `kind`; `refresh` returns what is known of it now."""

    def __init__(
        self, client: KubernetesClient, path: str, kind: str, parse: Callable[[Mapping[str, Any]], _T | None]
    ) -> None:
        self._client, self._path, self._kind = client, path, kind
        self._cache = ObjectCache(parse)
        self._watch: _Watch | None = None

    def refresh(self) -> Mapping[str, _T]:
        """Apply the events that have arrived; list again after a gap. Raises `UnavailableError` rather than guess."""
        try:
            if self._watch is not None:
                self._watch.drain(self._cache)
                if self._watch.ended:
                    self._open()
        except ExpiredVersionError:
            self._close()
        except IsthmusError:
            self._close()
            raise
        if self._watch is None:
            self._list()
            self._open()
        return self._cache.objects

    def _open(self) -> None:
        self._watch = _Watch(self._client, self._path, self._cache.version)
        weakref.finalize(self, self._watch.close)

    def _close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watch = None

    def _list(self) -> None:
        items, version = list_objects(self._client, self._path, self._kind)
        self._cache.replace(items, version)


def list_objects(client: KubernetesClient, path: str, kind: str, **query: str) -> tuple[list[Any], str]:
    """Return all objects of a collection at one version, which is returned too; the list begins again after 410."""
    for _ in range(_MAX_LISTS):
        items: list[Any] = []
        page: dict[str, str | int] = {"limit": _PAGE, **query}
        try:
            for _ in range(_MAX_PAGES):
                answer = client.get(path, **page)
                found, metadata = answer.get("items"), _metadata(answer)
                if answer["kind"] != kind or not isinstance(found, list | None):
                    raise UnavailableError(f"the answer to {path} cannot be read: {answer['kind']!r:.60} is no {kind}")
                items += found or []
                version, more = metadata.get("resourceVersion"), metadata.get("continue")
                if not isinstance(version, str) or not version:
                    raise UnavailableError(f"the answer to {path} has no version")
                if not more:
                    return items, version
                page["continue"] = str(more)
        except ExpiredVersionError:
            continue
        raise UnavailableError(f"the list {path} has more than {_MAX_PAGES} pages")
    raise UnavailableError(f"the list {path} changes faster than it can be read")


class _Watch:
    """A thread that reads one watch into a queue of lines."""

    def __init__(self, client: KubernetesClient, path: str, version: str) -> None:
        self._lines: queue.Queue[bytes | IsthmusError | None] = queue.Queue(_MAX_WAITING_EVENTS)
        self._closed, self._cut = threading.Event(), _do_nothing
        self.ended = False
        threading.Thread(target=self._read, args=(client, path, version), name="watch", daemon=True).start()

    def drain(self, cache: ObjectCache[Any]) -> None:
        """Apply what has arrived; raise what ended the watch unless it ended in order or by a cut."""
        while not self.ended:
            try:
                line = self._lines.get_nowait()
            except queue.Empty:
                return
            if line is None:
                self.ended = True
            elif isinstance(line, ExpiredVersionError):
                raise line
            elif isinstance(line, IsthmusError):
                self.ended = True
            elif line:
                cache.apply(line)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._cut()

    def _read(self, client: KubernetesClient, path: str, version: str) -> None:
        try:
            with client.watch(path, version, _WATCH_LIMIT_S) as (lines, self._cut):
                for line in lines:
                    if not self._put(line):
                        return
        except IsthmusError as error:
            self._put(error)
        finally:
            self._put(None)

    def _put(self, line: bytes | IsthmusError | None) -> bool:
        while not self._closed.is_set():
            try:
                self._lines.put(line, timeout=1.0)
            except queue.Full:
                continue
            return True
        return False


def _do_nothing() -> None:
    return None


def _metadata(item: object) -> Mapping[str, Any]:
    metadata = item.get("metadata") if isinstance(item, dict) else None
    if not isinstance(metadata, dict):
        raise UnavailableError("an object of the API server has no metadata")
    return metadata


def _key_of(item: object) -> str:
    """Return the object's id: an object of the same name that came later is another one."""
    uid = _metadata(item).get("uid")
    if not isinstance(uid, str) or not uid:
        raise UnavailableError("an object of the API server has no uid")
    return uid
