"""`CentreClient`: asks a decision centre for paths."""

from __future__ import annotations

from pydantic import ValidationError

from isthmus.wan.centre.centre_requests import AskMessage, LookMessage, NameMessage, PathState
from isthmus.wan.centre.line_client import CentreAddress, LineClient
from isthmus.wan.control.wan_topology import PathRequest, TransferRequest


class CentreClient:
    """Not thread-safe. Every method raises `UnavailableError` if the centre does not answer; each may be repeated."""

    def __init__(self, centre: CentreAddress) -> None:
        self._lines = LineClient(centre, "decision centre", "isthmus wan centre serves it")

    def ask(self, request: PathRequest | TransferRequest) -> PathState:
        """Hold a path; the same request again changes nothing."""
        return self._call(AskMessage(request=request))

    def confirm(self, name: str) -> PathState:
        """Book the path that is held."""
        return self._call(NameMessage(kind="confirm", name=name))

    def renew(self, name: str) -> PathState:
        """Hold it on."""
        return self._call(NameMessage(kind="renew", name=name))

    def release(self, name: str) -> PathState:
        """Give it back."""
        return self._call(NameMessage(kind="release", name=name))

    def look(self, name: str) -> PathState:
        """Return its state."""
        return self._call(LookMessage(name=name))

    def close(self) -> None:
        """Close the connection."""
        self._lines.close()

    def _call(self, message: AskMessage | NameMessage | LookMessage) -> PathState:
        found = self._lines.call(message.model_dump(mode="json", by_alias=True))
        try:
            return PathState.model_validate(found)
        except ValidationError as error:
            raise self._lines.refuse(error) from error
