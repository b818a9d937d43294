"""`SimulatedEngine`: an engine that decodes a token of each of its sequences a step, in closed form between events."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from isthmus.sim.kernel import Kernel
from isthmus.sim.rollouts.rollout_pipeline import DecodeSite
from isthmus.sim.rollouts.simulated_ledger import SampleGroup


@dataclass(order=True)
class _Running:
    """A sample that ends at step `end` of its engine, after `length` tokens."""

    end: int
    number: int
    length: int = field(compare=False)
    group: SampleGroup = field(compare=False)
    sample: int = field(compare=False)
    lease: int = field(compare=False)


OnEnd = Callable[["SimulatedEngine", SampleGroup, int, int], None]


class SimulatedEngine:
    """Decodes on the kernel's clock; `on_end` gets what has ended, `on_switch` the version from now on.

    `known_version` and `free_slots` are what the ledger knows, which lags by the delay of the link.
    """

    def __init__(
        self, kernel: Kernel, site: DecodeSite, on_update: Literal["keep", "refill", "abort"], prompt_tokens: int,
        *, on_end: OnEnd,
        on_switch: Callable[[SimulatedEngine, int], None],
    ) -> None:  # fmt: skip
        self.name, self.site, self.known_version, self.free_slots = site.name, site, 0, site.slots
        self.decode_s = self.wait_samples_s = self.wait_weights_s = self.num_tokens = 0.0
        self.version = self.published = 0
        self._kernel, self._on_update, self._prompt_tokens = kernel, on_update, prompt_tokens
        self._on_end, self._on_switch = on_end, on_switch
        self._running: list[_Running] = []
        self._pending: list[tuple[SampleGroup, int, int, int]] = []
        self._staged, self._number, self._generation = 0, 0, 0
        self._step, self._cached, self._since_s, self._prefill_s, self._planned = 0, 0.0, 0.0, 0.0, 0
        self._is_paused = self._is_over = False

    def add(self, group: SampleGroup, sample: int, lease: int, length: int) -> None:
        """Begin a sample whose response has `length` tokens, at the next step."""
        self._pending.append((group, sample, lease, length))
        self._poke()

    def drop(self, group: SampleGroup, sample: int) -> None:
        """Forget a sample that begins again."""
        self._pending = [one for one in self._pending if one[:2] != (group, sample)]
        self.settle()
        for one in self._running:
            if (one.group, one.sample) == (group, sample):
                self._cached -= self._prompt_tokens + one.length - (one.end - self._step)
        self._running = [one for one in self._running if (one.group, one.sample) != (group, sample)]
        heapq.heapify(self._running)
        if not self._is_paused:
            self._plan(self._running[0].end - self._step if self._running else 0)

    def stage(self, version: int) -> None:
        """Decode with `version` from the next step on."""
        self._staged = version
        self._poke()

    def pause(self) -> None:
        """Decode nothing until `resume`."""
        self.settle()
        self._is_paused = True
        self._generation += 1

    def resume(self) -> None:
        """Go on."""
        self.settle()
        self._is_paused = False
        self._wake((self._generation, 0))

    def stop(self) -> None:
        """Do nothing any more."""
        self._is_over = True

    def settle(self) -> None:
        """Count the whole steps until now, so that the sums of seconds and tokens are those of now."""
        now_s = self._kernel.now_s
        if self._running and not self._is_paused:
            self._advance(min(self._whole_steps(now_s - self._since_s), self._planned))
        elif not self._running:
            self._wait(now_s)

    def _wake(self, due: tuple[int, int]) -> None:
        generation, steps = due
        if generation != self._generation or self._is_over:
            return
        now_s = self._kernel.now_s
        if self._running:
            self._advance(steps)
        else:
            self._wait(now_s)
        while self._running and self._running[0].end <= self._step:
            self._end(heapq.heappop(self._running))
        if self._is_paused:
            return
        if self._staged > self.version:
            self._switch()
        for group, sample, lease, length in self._pending:
            self._number += 1
            one = _Running(self._step + length, self._number, length, group, sample, lease)
            heapq.heappush(self._running, one)
            self._cached += self._prompt_tokens
            self._prefill_s += self._prompt_tokens * self.site.rates.row_s
        self._pending.clear()
        self._since_s = now_s
        self._plan(self._running[0].end - self._step if self._running else 0)

    def _plan(self, steps: int) -> None:
        """Wake after this number of steps from `_since_s`, if any."""
        self._generation += 1
        self._planned = steps
        if steps:
            due_s = max(self._since_s + self._steps_s(steps), self._kernel.now_s)
            self._kernel.call_at(due_s, self._wake, (self._generation, steps))

    def _poke(self) -> None:
        """Wake at the next end of a step, or now where nothing is decoded."""
        if self._is_paused or self._is_over:
            return
        if not self._running:  # after what else happens now, so that samples which come together begin together
            self._kernel.call_at(self._kernel.now_s, self._wake, (self._generation, 0))
            return
        steps = self._whole_steps(self._kernel.now_s - self._since_s) + 1
        if steps < self._planned:
            self._plan(steps)

    def _steps_s(self, steps: int) -> float:
        """Return the seconds of the next steps: each reads one token of each sequence more than the one before."""
        count, rates = len(self._running), self.site.rates
        read = steps * self._cached + count * steps * (steps - 1) / 2
        return self._prefill_s * (steps > 0) + steps * rates.products_s(count) + read * rates.cached_token_s

    def _whole_steps(self, elapsed_s: float) -> int:
        """Return how many steps end within `elapsed_s`: the root of the quadratic `_steps_s`."""
        count, rates = len(self._running), self.site.rates
        square = count * rates.cached_token_s / 2
        linear = rates.products_s(count) + self._cached * rates.cached_token_s - square
        left_s = elapsed_s - self._prefill_s
        if left_s <= 0:
            return 0
        root = 2 * left_s / (linear + math.sqrt(linear * linear + 4 * square * left_s))
        steps = round(root)
        return steps if steps - root <= 1e-9 * max(root, 1.0) else steps - 1

    def _advance(self, steps: int) -> None:
        if not steps:
            return
        spent_s, count = self._steps_s(steps), len(self._running)
        self.decode_s += spent_s
        self.num_tokens += count * steps
        self._step += steps
        self._cached += count * steps
        self._since_s += spent_s
        self._prefill_s = 0.0
        self._planned -= steps
        if self._planned > 0:
            self._plan(self._planned)

    def _wait(self, now_s: float) -> None:
        waited_s = now_s - self._since_s
        if self.site.way is not None and self.published > self.version:
            self.wait_weights_s += waited_s
        else:
            self.wait_samples_s += waited_s
        self._since_s = now_s

    def _end(self, one: _Running) -> None:
        self._cached -= self._prompt_tokens + one.length
        self._on_end(self, one.group, one.sample, one.lease)

    def _switch(self) -> None:
        self.version = self._staged
        self._on_switch(self, self.version)
        if self._on_update == "refill":
            self._prefill_s += self._cached * self.site.rates.row_s
