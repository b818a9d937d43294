"""Which submissions are the same job: only an equal key of the same user, whatever ids are drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from isthmus.control.coordinator.coordinator import Coordinator
from isthmus.control.service.coordinator_actor import CoordinatorActor
from isthmus.control.service.submissions import Submissions
from isthmus.control.state.events import JobSubmitted
from isthmus.control.store.store_interface import MemoryStore
from isthmus.core.errors import ConflictError, UnavailableError
from isthmus.core.views.api_views import JobView
from tests.control.serving import MODEL, submission

LOW = b"\x00" * 16


def drawn(values: Sequence[bytes]) -> Callable[[int], bytes]:
    """A source of randomness that returns `values` one after another, then counts upwards."""
    left, counted = list(values), iter(range(1, 1000))

    def draw(count: int) -> bytes:
        if left:
            return left.pop(0)
        return b"".join(next(counted).to_bytes(16, "big") for _ in range(count // 16))

    return draw


class Desk:
    """The submissions of a server with an empty log and this randomness."""

    def __init__(self, *values: bytes) -> None:
        self.store = MemoryStore()
        self.actor = CoordinatorActor(self.store, lambda _: None)
        self.submissions = Submissions(self.actor, None, lambda: 1.0, drawn(values))

    def submit(self, user: str = "ann", key: str = "", **fields: object) -> JobView:
        request = self.submissions.submit_request(user, submission(key=key, **fields))
        found: JobView = self.actor.execute([request])[0].value()
        return found

    def jobs(self) -> list[str]:
        return [event.job_id for _, event in self.store.events() if isinstance(event, JobSubmitted)]


@pytest.mark.attack
def test_equal_submissions_are_two_jobs_even_if_the_same_id_is_drawn() -> None:
    """A colliding id is drawn again: before, the second job was acknowledged with the id of the first and lost."""
    desk = Desk(LOW, LOW, LOW)
    first, second = desk.submit(), desk.submit()
    assert first.id != second.id
    assert desk.jobs() == [first.id, second.id]
    assert Coordinator.replay(event for _, event in desk.store.events()).state.num_submitted == 2


@pytest.mark.attack
def test_many_equal_submissions_at_once_are_as_many_jobs() -> None:
    """In bulk too, where all ids are drawn together and collide with each other."""
    desk = Desk(LOW * 3)
    found = desk.submissions.submit_all("ann", [submission()] * 3)
    assert len({str(one) for one in found}) == 3
    assert desk.jobs() == found


def test_another_user_with_the_same_id_and_content_has_a_job_of_its_own() -> None:
    """Users do not meet in an id."""
    desk = Desk(LOW, LOW)
    assert desk.submit("ann").id != desk.submit("bob").id
    assert len(desk.jobs()) == 2


def test_an_equal_key_of_the_same_user_is_the_same_job_only_with_equal_content() -> None:
    """A retry finds its job; another field, or another model of the same name, is a conflict that names the key."""
    desk = Desk()
    first = desk.submit(key="k")
    assert desk.submit(key="k").id == first.id
    with pytest.raises(ConflictError, match=r"key 'k' already belongs to another job, 'tiny-.*other content"):
        desk.submit(key="k", output="elsewhere/{job}")
    other = submission(key="k").model_copy(update={"model": MODEL.model_copy(update={"num_layers": 2})})
    with pytest.raises(ConflictError, match="other content"):
        desk.actor.execute([desk.submissions.submit_request("ann", other)])[0].value()
    assert desk.submit("bob", key="k").id != first.id
    assert len(desk.jobs()) == 2


def test_an_event_cannot_bring_the_id_of_another_job() -> None:
    """The coordinator refuses it, also with equal content: no event merges two jobs."""
    coordinator = Coordinator()
    event = JobSubmitted(now_s=1.0, job_id="tiny-3f9a2c1b", user="ann", submission=submission())
    coordinator.handle(event)
    with pytest.raises(ConflictError, match="the id tiny-3f9a2c1b belongs to another job"):
        coordinator.admit(event.model_copy(update={"now_s": 2.0}))


def test_a_source_that_repeats_itself_ends_in_an_error() -> None:
    """The submission is refused after a bounded number of draws; it neither hangs nor takes another's place."""
    desk = Desk(*[LOW] * 200)
    desk.submit()
    with pytest.raises(UnavailableError, match="100 random ids for job 'tiny' are all taken"):
        desk.submit()
    assert len(desk.jobs()) == 1
