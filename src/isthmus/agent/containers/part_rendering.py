"""`PartRendering`: the rendered parts of an agent: objections to orders, containers of holds, settings of starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from isthmus.agent.adapters.scheduler_adapter import ContainerNeed
from isthmus.agent.containers.part_renderer import (
    PartRenderer,
    container_need,
    image_program,
    image_reference,
    with_rendered_fields,
)
from isthmus.core.errors import IsthmusError
from isthmus.core.job import Job
from isthmus.core.messages.agent_messages import PartOrder
from isthmus.core.messages.worker_folder import WorkerSpec, write_atomically
from isthmus.core.plan import Plan
from isthmus.core.pool import Link
from isthmus.render import RenderedPart, settings_document
from isthmus.site import PartKey, SitePart

RENDER_FILE = "render.json"
KEPT_S = 5.0
"""How long a rendered part counts: after it images, drivers and templates are looked at again."""


class PartRendering:
    """Renders with `renderer`; `clock` is in seconds. A part that cannot be rendered is an objection to its order.

    `resolve` returns a job, of an id and a user, with the places of its paths at this site.
    """

    def __init__(
        self, renderer: PartRenderer, clock: Callable[[], float], resolve: Callable[[str, Job, str], Job]
    ) -> None:
        self._renderer, self._clock, self._resolve = renderer, clock, resolve
        self._known: dict[PartKey, tuple[float, str, dict[str, RenderedPart], IsthmusError | None]] = {}

    def objections(self, orders: Iterable[PartOrder]) -> dict[PartKey, str]:
        """Return why parts that do not run yet cannot be started here, by part."""
        found, wanted = {}, set[PartKey]()
        for order in orders:
            if order.desired in ("queued", "ready", "prepared") and order.spec is not None and order.plan is not None:
                key = order.job, order.attempt
                wanted.add(key)
                resolve = partial(self._resolve, order.job, order.spec, order.user)
                _, error = self._render(key, resolve, order.plan, order.links)
                if error is not None:
                    found[key] = str(error)
        self._known = {key: one for key, one in self._known.items() if key in wanted}
        return found

    def containers(self, part: SitePart) -> dict[str, ContainerNeed]:
        """Return what the ranks of a part run in, by node group; raise `InputError` if it cannot be rendered."""
        if self._renderer.starts != "pod" or part.spec is None or part.plan is None:
            return {}
        resolve = partial(self._resolve, part.job, part.spec, part.user)
        found, error = self._render(part.key, resolve, part.plan, part.links)
        if error is not None:
            raise error
        return {group: container_need(one) for group, one in found.items()}

    def render_worker(self, folder: Path, part: SitePart, spec: WorkerSpec) -> tuple[WorkerSpec, RenderedPart]:
        """Render one worker, leave `render.json` in its folder; return its spec and what it starts with."""
        rendered = self._renderer.render_worker(spec, part.links)
        write_atomically(folder / RENDER_FILE, settings_document(rendered.settings))
        return with_rendered_fields(spec, rendered), rendered

    def program(self, rendered: RenderedPart) -> tuple[str, ...]:
        """Return the program of a worker that its image names; empty where it is the site's own."""
        return image_program(rendered, self._renderer.starts)

    def image(self, rendered: RenderedPart) -> str:
        """Return the image that the pods of a hold must have; empty where the scheduler makes none from images."""
        return image_reference(rendered) if self._renderer.starts == "pod" else ""

    def _render(
        self, key: PartKey, job: Callable[[], Job], plan: Plan, links: Iterable[Link]
    ) -> tuple[dict[str, RenderedPart], IsthmusError | None]:
        now_s, known = self._clock(), self._known.get(key)
        if known is None or known[1] != plan.id or now_s - known[0] > KEPT_S:
            found, problem = dict[str, RenderedPart](), None
            try:
                found = self._renderer.render(job(), key[0], plan, links)
            except IsthmusError as error:
                problem = error
            self._known[key] = known = now_s, plan.id, found, problem
        return known[2], known[3]
