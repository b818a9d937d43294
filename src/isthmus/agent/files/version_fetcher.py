"""`VersionFetcher`: brings the versions that the server orders to the site's cache, in threads of their own.

One version of an owner is brought at a time, and `MAX_FETCHES` of all. While versions of other owners wait, one that
has had its place for `TURN_S` gives it up and goes on later: slow sources delay others by their turns only. What was
brought so far is kept over interruptions, and a restarted agent goes on from there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from isthmus.agent.files.version_cache import VersionCache
from isthmus.agent.files.version_source import VersionSource
from isthmus.core.catalogue import CopyKey, FileManifest, HeldCopy, ManifestFile, NeededVersion
from isthmus.core.errors import InputError, IsthmusError, NotFoundError, UnavailableError

MAX_FETCHES = 4
"""Versions that are brought at once."""

MAX_HELD_COPIES = 4_096
"""Largest number of copies in a report."""

RETRIES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Waits before further tries of a file that could not be read; `MIN_BYTES` more of it renew them."""

MIN_BYTES, MIN_BYTES_S = 1 << 20, 60.0
"""A source that sends fewer bytes in this time counts as unavailable."""

TURN_S = 60.0
"""How long a version is brought before it makes room for one of an owner that waits."""

_STEPS = 10
_MAX_PROBLEM_CHARS = 300
_MEASURED_BYTES = 1 << 20
_log = logging.getLogger("isthmus.agent")

FetchManifest = Callable[[CopyKey], FileManifest]


@dataclass(kw_only=True)
class _Fetch:
    """A version that is being brought, or that could not be."""

    needed: NeededVersion
    thread: threading.Thread | None = None
    # When its thread was started, by the fetcher's clock.
    since_s: float = 0.0
    num_bytes: int = 0
    problem: str = ""


class _Pace:
    """How fast a source sends: one that only drips would hold its thread for years."""

    def __init__(self, now_s: float) -> None:
        self._since_s, self._at_bytes = now_s, 0

    def check(self, path: str, num_bytes: int, now_s: float) -> None:
        """Raise `UnavailableError` if fewer than `MIN_BYTES` have come in `MIN_BYTES_S`."""
        if now_s - self._since_s < MIN_BYTES_S:
            return
        if num_bytes - self._at_bytes < MIN_BYTES:
            raise UnavailableError(f"{path}: fewer than {MIN_BYTES} bytes came in {MIN_BYTES_S:g} s")
        self._since_s, self._at_bytes = now_s, num_bytes


class _DroppedError(Exception):
    """The version is not needed any more."""


class _TurnOverError(Exception):
    """Versions of other owners wait for the place."""


class VersionFetcher:
    """Keeps `cache` as the server's orders say. `manifest` asks the server for the files of an ordered version.

    `clock` is monotonic, in seconds; `wait` sleeps unless the fetcher is closed meanwhile.
    """

    def __init__(
        self,
        cache: VersionCache,
        source: VersionSource,
        manifest: FetchManifest,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self.cache, self._source, self._manifest, self._clock = cache, source, manifest, clock
        self._closed = threading.Event()
        self._wait = wait or self._closed.wait
        self._lock = threading.Lock()
        self._fetches: dict[CopyKey, _Fetch] = {}
        self._wanted: dict[CopyKey, NeededVersion] = {}
        self._fetch_gbps: float | None = None

    @property
    def fetch_gbps(self) -> float | None:
        """The rate of the last versions, rounded to two digits; None before the first."""
        return None if self._fetch_gbps is None else float(f"{self._fetch_gbps:.2g}")

    def update(self, needed: Iterable[NeededVersion], dropped: Collection[CopyKey] = ()) -> None:
        """Bring the versions `needed` by the parts of this site; remove the copies of `dropped` ones.

        A problem is forgotten once its version is not needed any more: a later order tries again.
        """
        with self._lock:
            self._wanted = {CopyKey(owner=one.owner, version=one.version): one for one in needed}
            for key in [key for key, one in self._fetches.items() if key not in self._wanted and not _is_alive(one)]:
                del self._fetches[key]
            for key in dropped:
                if key not in self._wanted and key not in self._fetches:
                    self.cache.drop(key)
            for key, one in self._wanted.items():
                if self.cache.has(key):
                    self.cache.touch(key)
                elif key not in self._fetches:
                    self._fetches[key] = _Fetch(needed=one)
            self._start_next()

    def copies(self) -> tuple[HeldCopy, ...]:
        """Return the site's copies as reported: complete ones, and those on the way, in tenths of their size."""
        found = self.cache.complete()
        with self._lock:
            for key, fetch in self._fetches.items():
                if key not in found:
                    found[key] = HeldCopy(
                        owner=key.owner,
                        version=key.version,
                        num_bytes=_in_steps(fetch.num_bytes, fetch.needed.num_bytes),
                        problem=fetch.problem,
                    )
            first = sorted(found, key=lambda key: (key not in self._wanted, key.owner, key.version))
        return tuple(found[key] for key in first[:MAX_HELD_COPIES])

    def close(self) -> None:
        """Stop; what has come so far is kept."""
        self._closed.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the versions that are being brought; return whether all have ended."""
        with self._lock:
            threads = [one.thread for one in self._fetches.values() if one.thread is not None]
        for thread in threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in threads)

    def _start_next(self) -> None:
        """Start further threads; each owner has one."""
        busy = {key.owner for key, one in self._fetches.items() if _is_alive(one)}
        for key, fetch in self._fetches.items():
            if len(busy) >= MAX_FETCHES or self._closed.is_set():
                return
            if fetch.thread is None and key.owner not in busy:
                fetch.thread = threading.Thread(
                    target=self._bring, args=(key, fetch), name=f"version {key}", daemon=True
                )
                fetch.since_s = self._clock()
                fetch.thread.start()
                busy.add(key.owner)

    def _bring(self, key: CopyKey, fetch: _Fetch) -> None:
        started_s, came, is_over = self._clock(), 0, False
        try:
            manifest = self._manifest_of(key)
            if manifest.num_bytes != fetch.needed.num_bytes:
                raise InputError(f"the manifest of {key} has another size than the server says")
            fetch.num_bytes = self.cache.present_bytes(key, manifest)
            with self._lock:
                used = set(self._wanted)
            self.cache.reserve(key, manifest, used)
            for file, present in self.cache.missing(key, manifest):
                came += self._bring_file(key, fetch, file, present)
            self.cache.publish(key, manifest)
            self._measure(came, self._clock() - started_s)
            _log.info("brought %s/%s: %d bytes", fetch.needed.owner, fetch.needed.name, came)
        except (_DroppedError, NotFoundError):
            _log.info("stopped bringing %s/%s: it is not needed any more", fetch.needed.owner, fetch.needed.name)
        except _TurnOverError:
            _log.info("%s/%s makes room for versions of others", fetch.needed.owner, fetch.needed.name)
            is_over = True
        except (IsthmusError, OSError) as error:
            fetch.problem = str(error)[:_MAX_PROBLEM_CHARS]
            _log.warning("cannot bring %s/%s: %s", fetch.needed.owner, fetch.needed.name, error)
        finally:
            self.cache.release(key)
        if is_over:
            self._end_turn(key, fetch)

    def _end_turn(self, key: CopyKey, fetch: _Fetch) -> None:
        """Put a fetch behind all others, and start the next one."""
        with self._lock:
            fetch.thread = None
            self._fetches.pop(key, None)
            if key in self._wanted:
                self._fetches[key] = fetch
            self._start_next()

    def _manifest_of(self, key: CopyKey) -> FileManifest:
        for wait_s in (*RETRIES_S, None):
            self._require_turn(key)
            try:
                return self._manifest(key)
            except UnavailableError:
                if wait_s is None:
                    raise
                self._wait(wait_s)
        raise AssertionError("the last wait is None")  # pragma: no cover

    def _bring_file(self, key: CopyKey, fetch: _Fetch, file: ManifestFile, present: int) -> int:
        """Bring one file, from its present bytes on; return how many bytes came. Raises what cannot be repaired."""
        waits, came, fresh = list(RETRIES_S), 0, present == 0
        while True:
            before, pace = came, _Pace(self._clock())
            try:
                source = self._source.read(fetch.needed.source, file.path, key.owner, present)
                for place, block in source if present < file.num_bytes else ():
                    self._require_turn(key)
                    pace.check(file.path, came - before, self._clock())
                    self.cache.write(key, file, place, block)
                    present, came = place + len(block), came + len(block)
                    fetch.num_bytes = min(fetch.needed.num_bytes, fetch.num_bytes + len(block))
                if present < file.num_bytes:
                    raise UnavailableError(f"{fetch.needed.source}/{file.path} ended after {present} bytes")
                if self.cache.finish(key, file):
                    return came
                if fresh:
                    raise InputError(
                        f"{fetch.needed.source}/{file.path} is not the file that was added: its SHA-256 differs",
                        hint="add the version again, from where sites read it",
                    )
                present, fresh = 0, True
            except UnavailableError:
                self._require_turn(key)
                waits = list(RETRIES_S) if came - before >= MIN_BYTES else waits
                if not waits:
                    raise
                self._wait(waits.pop(0))

    def _require_turn(self, key: CopyKey) -> None:
        """Raise if the version is not needed any more, or its turn is over."""
        with self._lock:
            if key not in self._wanted or self._closed.is_set():
                raise _DroppedError
            mine = self._fetches.get(key)
            if mine is not None and self._clock() - mine.since_s >= TURN_S and self._others_wait():
                raise _TurnOverError

    def _others_wait(self) -> bool:
        """Return whether all places are taken and an owner without one waits."""
        busy = {key.owner for key, one in self._fetches.items() if _is_alive(one)}
        waits = any(one.thread is None and key.owner not in busy for key, one in self._fetches.items())
        return len(busy) >= MAX_FETCHES and waits

    def _measure(self, came: int, seconds: float) -> None:
        if came >= _MEASURED_BYTES and seconds > 0:
            gbps = came * 8 / seconds / 1e9
            before = self._fetch_gbps
            self._fetch_gbps = gbps if before is None else (before + gbps) / 2


def _is_alive(fetch: _Fetch) -> bool:
    return fetch.thread is not None and fetch.thread.is_alive()


def _in_steps(num_bytes: int, total: int) -> int:
    """Return a number of bytes rounded down to tenths, so that a report changes at most ten times."""
    step = max(1, total // _STEPS)
    return min(num_bytes // step * step, max(0, total - 1))
