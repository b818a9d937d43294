"""`read_http`: the bytes of a file at a URL that a user has named, from an offset on, within the site's rules."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import httpx

from isthmus.core.errors import InputError, UnavailableError
from isthmus.core.network.address_rules import Resolve, allowed_address
from isthmus.core.owner.owner_policy import FetchPolicy

MAX_REDIRECTS = 5
_TIMEOUT = httpx.Timeout(30, connect=10)
_RANGE = re.compile(r"bytes (\d{1,19})-\d{1,19}/(\d{1,19}|\*)")
_REDIRECTS = (301, 302, 303, 307, 308)
_TEMPORARY = (408, 425, 429)


@dataclass(frozen=True, kw_only=True)
class HttpReader:
    """Reads files by HTTP under a policy. `transport` and `resolve` replace the network in tests."""

    policy: FetchPolicy = field(default_factory=FetchPolicy)
    transport: httpx.BaseTransport | None = None
    resolve: Resolve | None = None

    def read(self, url: str, offset: int) -> Iterator[tuple[int, bytes]]:
        """Yield blocks of a file with their places, from `offset` on, or from 0 if the server has no ranges.

        Follows redirects, each to an address that the policy allows. Raises `InputError` if the file cannot be read by
        this policy or is not there, `UnavailableError` if it cannot be read now.
        """
        asked = httpx.URL(url)
        for _ in range(MAX_REDIRECTS + 1):
            target: str | None = None
            with self._client() as client, self._open(client, asked, offset) as answer:
                if answer.status_code not in _REDIRECTS:
                    yield from _blocks(answer, url, offset)
                    return
                target = answer.headers.get("location")
            asked = _redirected(asked, target)
        raise InputError(f"{url} redirects more than {MAX_REDIRECTS} times", hint="give the URL that it leads to")

    def _client(self) -> httpx.Client:
        return httpx.Client(
            timeout=_TIMEOUT,
            trust_env=False,
            verify=_tls_context(),
            transport=self.transport,
            limits=httpx.Limits(max_connections=1),
        )

    def _open(self, client: httpx.Client, url: httpx.URL, offset: int) -> _Answer:
        """Send a request to the allowed address of a URL's host."""
        if url.scheme not in ("http", "https") or url.scheme not in self.policy.schemes or not url.host:
            raise InputError(
                f"{str(url)[:160]}: the site reads URLs of {', '.join(self.policy.schemes)}",
                hint="the site's owner sets fetch.schemes of the policy",
            )
        port = url.port or (443 if url.scheme == "https" else 80)
        address = allowed_address(url.host, port, self.policy.networks, self.resolve)
        head = {"Host": url.netloc.decode("ascii"), "Accept-Encoding": "identity"}
        head |= {"Range": f"bytes={offset}-"} if offset else {}
        request = client.build_request(
            "GET",
            url.copy_with(host=address),
            headers=head,
            extensions={"sni_hostname": url.host},
        )
        return _Answer(client, request)


class _Answer:
    """A response that is closed at the end, whose errors are ours."""

    def __init__(self, client: httpx.Client, request: httpx.Request) -> None:
        self._client, self._request = client, request

    def __enter__(self) -> httpx.Response:
        try:
            self._response = self._client.send(self._request, stream=True)
        except httpx.HTTPError as error:
            raise _unavailable(self._request, error) from error
        return self._response

    def __exit__(self, *_: object) -> None:
        self._response.close()


def _blocks(answer: httpx.Response, url: str, offset: int) -> Iterator[tuple[int, bytes]]:
    """Yield the blocks of a response with their places."""
    code = answer.status_code
    if code >= 500 or code in _TEMPORARY:
        raise UnavailableError(f"{url} answered {code}")
    if code not in (200, 206):
        raise InputError(f"{url} answered {code}", hint="check that the URL is readable from the site, without login")
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise InputError(f"{url} sends its files compressed", hint="serve them as they are")
    place = 0
    if code == 206:
        found = _RANGE.fullmatch(answer.headers.get("content-range", ""))
        if found is None or int(found[1]) != offset:
            raise UnavailableError(f"{url} answered another range than the one asked for")
        place = offset
    try:
        for block in answer.iter_raw():  # as they come, so that the caller sees how fast
            yield place, block
            place += len(block)
    except httpx.HTTPError as error:
        raise _unavailable(answer.request, error) from error


def _redirected(url: httpx.URL, location: str | None) -> httpx.URL:
    """Return where a redirect leads; raise `InputError` if that is nowhere, or from `https` to `http`."""
    try:
        target = url.join(location or "")
    except (httpx.InvalidURL, ValueError) as error:
        raise InputError(f"{url} redirects to no URL") from error
    if not location or target.userinfo or (url.scheme == "https" and target.scheme != "https"):
        raise InputError(f"{url} redirects to no safe URL: {str(location)[:160]}")
    return target


def _unavailable(request: httpx.Request, error: Exception) -> UnavailableError:
    return UnavailableError(f"{request.headers['host']}: {error or type(error).__name__}")


@cache
def _tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()
