"""`PagedEngine`: a `DecodeEngine` whose tokens do not depend on the batch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PretrainedConfig

from isthmus.core.errors import ConflictError, InputError, UnavailableError
from isthmus.serve.batching.batch_scheduler import BatchLimits, BatchScheduler, ScheduledSequence
from isthmus.serve.batching.decode_records import (
    DecodeEvent,
    DecodeRequest,
    DecodingEnded,
    OnSwitch,
    SequenceKey,
    TokenDecoded,
)
from isthmus.serve.batching.step_plan import CachedRows, SequenceRows, StepPlan
from isthmus.serve.draw_token import draw_token
from isthmus.serve.paged.check_row_independence import check_row_independence
from isthmus.serve.paged.page_cache import CopiedRows, PageCache
from isthmus.serve.paged.row_model import RowModel
from isthmus.serve.paged.row_tile import tile_rows
from isthmus.serve.sequence_file import SequenceHeader, pack_sequence, unpack_sequence

DrawToken = Callable[[np.ndarray, DecodeRequest, int], tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class PagedEngineConfig:
    """Sizes of an engine: `tile_rows` rows are computed at once, up to `max_tiles` tiles a step.

    The tile is the one shape that is ever computed: a batch of any size is some tiles, the last one padded. Engines
    between which sequences move need the same `tile_rows` and `page_tokens`; the other sizes may differ. With
    `records_routing` an engine of a model with experts reports which ones each token took; sequences then move by their
    tokens alone.
    """

    num_pages: int
    page_tokens: int = 16
    tile_rows: int = 8
    max_tiles: int = 4
    max_sequences: int | None = None
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    records_routing: bool = False

    def __post_init__(self) -> None:
        """Raise `InputError` for sizes with which nothing can be decoded."""
        if self.tile_rows < 1 or self.max_tiles < 1:
            raise InputError(f"{self.max_tiles} tiles of {self.tile_rows} rows", hint="use at least 1 of each")

    @property
    def limits(self) -> BatchLimits:
        """Return the sizes that the scheduler needs."""
        step_rows = self.tile_rows * self.max_tiles
        return BatchLimits(
            num_pages=self.num_pages, page_tokens=self.page_tokens, step_rows=step_rows,
            max_sequences=self.max_sequences or step_rows,
        )  # fmt: skip


class PagedEngine:
    """Decodes by the model of `model_config` with weights `version`, a `state_dict` of that configuration.

    `draw` takes the logits of a sequence [V], its request and the position of the token, and returns the token and its
    log-probability. Raises `InputError` for weights of another model, and where this machine computes a row differently
    at different places of a tile.
    """

    def __init__(
        self, model_config: PretrainedConfig, config: PagedEngineConfig, version: int,
        weights: Mapping[str, torch.Tensor], draw: DrawToken = draw_token,
    ) -> None:  # fmt: skip
        self._config, self._draw = config, draw
        limits = config.limits
        self._model = RowModel(
            model_config, config.dtype, config.device, limits.max_tokens, config.records_routing
        )  # fmt: skip
        self._model.use(self._model.stage(weights))
        check_row_independence(self._model, config.tile_rows)
        self._scheduler = BatchScheduler(limits, version)
        self._cache: PageCache | None = self._model.make_cache(config.num_pages, config.page_tokens)
        self._host: dict[SequenceKey, CopiedRows] = {}
        self._staged: dict[int, dict[str, torch.Tensor]] = {}
        self._arithmetic = {
            "model": hashlib.sha256(self._model.describe().encode()).hexdigest(),
            "dtype": str(config.dtype),
            "tile_rows": str(config.tile_rows),
            "page_tokens": str(config.page_tokens),
            "device": _device_name(config.device),
            "torch": str(torch.__version__),
            "threads": str(torch.get_num_threads()),
        }

    @property
    def version(self) -> int:
        """Return the version of the weights that decode the next step."""
        return self._scheduler.version

    @property
    def num_sequences(self) -> int:
        """Return how many sequences have not ended."""
        return len(self._scheduler.sequences)

    @property
    def num_swaps(self) -> int:
        """Return how often a sequence gave way to older ones for want of pages."""
        return self._scheduler.num_swaps

    @property
    def num_shared_rows(self) -> int:
        """Return how many rows were not computed, as another sequence with the same first tokens had them."""
        return self._scheduler.num_shared_rows

    def add(self, request: DecodeRequest) -> None:
        """Queue a request; raises `InputError` and `ConflictError`."""
        self._check_request(request)
        self._scheduler.add(request)

    def stop(self, key: SequenceKey) -> None:
        """Drop a sequence; raises `NotFoundError`."""
        self._scheduler.remove(key)
        self._host.pop(key, None)

    def step(self) -> list[DecodeEvent]:
        """Decode at most one token of each sequence; raises `UnavailableError` while the memory is released."""
        if self._cache is None:
            raise UnavailableError("the engine has released its memory", hint="call acquire_memory first")
        plan = self._scheduler.plan_step()
        self._move_rows(plan, self._cache)
        logits: dict[int, torch.Tensor] = {}
        for tile in tile_rows(plan.rows, self._config.tile_rows, self._config.page_tokens, self._config.device):
            hidden = self._model.forward(tile, self._cache)
            if tile.decodes:
                found = self._model.logits(hidden)
                logits.update({index: found[place] for place, index in tile.decodes})
        events: list[DecodeEvent] = []
        for index, rows in enumerate(plan.rows):
            events += self._end_rows(rows, logits.get(index), self._cache) if rows.decodes else []
            if not rows.decodes:
                self._scheduler.complete(rows, None)
        return events

    def stage_weights(self, version: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy the weights of another version; raises `InputError` for those of another model."""
        self._staged[version] = self._model.stage(weights)

    def switch_weights(self, version: int, on_switch: OnSwitch) -> list[SequenceKey]:
        """Decode by staged weights from the next step on; raises `ConflictError` for a version that is not staged."""
        staged = self._staged.pop(version, None)
        if staged is None:
            raise ConflictError(f"weights {version} are not staged", hint="call stage_weights first")
        self._staged = {number: one for number, one in self._staged.items() if number > version}
        self._model.use(staged)
        dropped, renewed = self._scheduler.switch_version(version, on_switch)
        for key in (*dropped, *renewed):
            self._host.pop(key, None)
        return dropped

    def export_sequence(self, key: SequenceKey) -> bytes:
        """Return a sequence with its cache; raises `NotFoundError` and `ConflictError`."""
        sequence = self._scheduler.find(key)
        if self._config.records_routing:
            hint = "add its tokens as a request at the other engine"
            raise ConflictError("a sequence whose routing is recorded does not move with its cache", hint=hint)
        if sequence.num_pending != 1 or not sequence.num_response:
            raise ConflictError(
                f"sequence {tuple(key)} has {sequence.num_rows} rows of {len(sequence.tokens)} tokens",
                hint="add its tokens as a request at the other engine",
            )
        if sequence.swapped or self._cache is None:
            rows = self._host[key].rows
        else:
            rows = self._cache.read(sequence.pages, sequence.num_rows).rows
        response = sequence.tokens[len(sequence.request.prompt_tokens) :]
        header = SequenceHeader.of(
            sequence.request, response, arithmetic=self._arithmetic, version=self.version, uniform=sequence.uniform,
            rows=rows,
        )  # fmt: skip
        return pack_sequence(header, rows)

    def import_sequence(self, content: bytes) -> SequenceKey:
        """Go on with an exported sequence; raises `InputError` and `ConflictError`."""
        if self._config.records_routing:
            raise InputError("an exported sequence has no routing", hint="add its tokens as a request")
        header, rows = unpack_sequence(
            content, arithmetic=self._arithmetic, max_tokens=self._config.limits.max_tokens,
            row_shape=self._model.row_shape, dtype=self._config.dtype,
        )  # fmt: skip
        if header.version != self.version:
            raise InputError(
                f"the exported sequence is of weights {header.version}, this engine has {self.version}",
                hint="switch the engine first, or add the tokens as a request",
            )
        request = header.request()
        self._check_request(request)
        self._scheduler.adopt(request, header.num_rows, header.uniform)
        self._host[request.key] = CopiedRows(rows)
        return request.key

    def release_memory(self) -> None:
        """Free the cache, so that training can have its memory; rows of unfinished sequences move to host memory."""
        if self._cache is not None:
            self._copy_out(self._scheduler.swap_out_all(), self._cache)
            self._cache = None

    def acquire_memory(self) -> None:
        """Allocate the cache again; sequences go on in the next step as if nothing had been."""
        if self._cache is None:
            self._cache = self._model.make_cache(self._config.num_pages, self._config.page_tokens)

    def _check_request(self, request: DecodeRequest) -> None:
        tokens = (*request.prompt_tokens, *request.response_tokens)
        if tokens and not 0 <= min(tokens) <= max(tokens) < self._model.num_tokens:
            raise InputError(
                f"sequence {tuple(request.key)} has token {max(tokens)}, the vocabulary {self._model.num_tokens}",
                hint="use the tokenizer of the model",
            )
        if not 0 <= request.temperature < float("inf"):
            raise InputError(f"temperature {request.temperature}", hint="use 0 for the most probable token, or above")

    def _end_rows(self, rows: SequenceRows, logits: torch.Tensor | None, cache: PageCache) -> list[DecodeEvent]:
        """Draw the next token of a sequence from its logits [V], and end the sequence where it is complete."""
        sequence = self._scheduler.find(rows.key)
        position = sequence.num_response
        if logits is None:
            raise AssertionError(f"rows of {rows.key} decode and have no logits")
        try:
            token, log_probability = self._draw(logits.numpy(), sequence.request, position)
        except ValueError:
            self._scheduler.remove(rows.key)
            return [DecodingEnded(key=rows.key, num_tokens=position, reason="failed")]
        self._scheduler.complete(rows, token)
        routing = b""
        if self._config.records_routing:
            experts = cache.read_experts(sequence.pages, range(sequence.num_routed, sequence.num_rows))
            routing, sequence.num_routed = experts.numpy().tobytes(), sequence.num_rows
        decoded = TokenDecoded(
            key=rows.key, position=position, token=token, log_probability=log_probability, version=self.version,
            routing=routing,
        )  # fmt: skip
        return [decoded, *self._ended(sequence, token)]

    def _ended(self, sequence: ScheduledSequence, token: int) -> list[DecodeEvent]:
        request, num_tokens = sequence.request, sequence.num_response
        stopped = token in request.stop_tokens
        if not stopped and num_tokens < request.max_response_tokens:
            return []
        self._scheduler.remove(request.key)
        return [DecodingEnded(key=request.key, num_tokens=num_tokens, reason="stop" if stopped else "length")]

    def _move_rows(self, plan: StepPlan, cache: PageCache) -> None:
        self._copy_out(plan.swapped_out, cache)
        for one in plan.swapped_in:
            cache.write(one.pages, self._host.pop(one.key))

    def _copy_out(self, swapped_out: tuple[CachedRows, ...] | list[CachedRows], cache: PageCache) -> None:
        for one in swapped_out:
            self._host[one.key] = cache.read(one.pages, one.num_rows)


def _device_name(device: torch.device) -> str:
    """Return what a device computes like: its model, or the instructions of a CPU."""
    if device.type == "cpu":
        return f"cpu {torch.backends.cpu.get_cpu_capability()}"
    return f"{device.type} {torch.get_device_module(device).get_device_name(device)}"
