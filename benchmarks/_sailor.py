"""A checkout of Sailor (SOSP'25) as a peer: its measured tables, its formula, its plan format, its simulator.

Nothing of Sailor is copied here: tables are read from the checkout, and its simulator and planners are run
from it. `Tables` repeats what its simulator computes, by the same measured numbers, fast enough for a search;
`Referee` is the simulator itself, and has the last word.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from isthmus.core.errors import InputError

BUCKET_BYTES = 500e6
"""Gradients are reduced in pieces of at most this."""

FLOAT_BYTES = 4
STATE_BYTES = 24
"""Bytes per parameter: weights, two moments, gradients, and two further copies."""

PROCESS_BYTES = (2e9, 3e9)
"""Beside the model, without and with tensor parallelism."""

Place = tuple[str, str]
"""A kind of chips and the zone they are in, both by Sailor's names."""


@dataclass(frozen=True)
class Case:
    """What both sides are asked: a model and batch by Sailor's names, and the chips there are."""

    name: str
    model: str
    samples: int
    chips: Mapping[Place, int]
    chips_per_node: int = 4

    @property
    def zones(self) -> tuple[str, ...]:
        """The zones, in order of first use."""
        return tuple(dict.fromkeys(zone for _, zone in self.chips))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of chips, in order of first use."""
        return tuple(dict.fromkeys(kind for kind, _ in self.chips))

    @property
    def num_chips(self) -> int:
        """All chips."""
        return sum(self.chips.values())


@dataclass(frozen=True)
class StageUse:
    """A stage of a pipeline in Sailor's sense: its layers, and (place, tensor parallelism) per replica."""

    layers: tuple[int, ...]
    replicas: tuple[tuple[Place, int], ...]


@dataclass(frozen=True)
class SailorPlan:
    """A plan in Sailor's sense: pipelines of stages; every stage of a pipeline has as many replicas."""

    micro_batch_size: int
    pipelines: tuple[tuple[StageUse, ...], ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the form that Sailor's simulator reads."""
        used: dict[str, int] = {}
        pipelines = []
        for stages in self.pipelines:
            each = []
            for stage in stages:
                rows = []
                for (kind, zone), tp in stage.replicas:
                    used[kind] = used.get(kind, 0) + tp
                    rows.append(([(kind, tp, zone)], tp))
                each.append(rows)
            pipelines.append(
                {
                    "num_stages": len(stages),
                    "layers_per_stage": [list(stage.layers) for stage in stages],
                    "tmp_per_stage": each,
                    "dp": [len(stage.replicas) for stage in stages],
                }
            )
        return {"pipeline_list": pipelines, "mbs": self.micro_batch_size, "used_gpus": used}


def used_chips(plan: Mapping[str, Any]) -> dict[Place, int]:
    """Return the chips that a plan in Sailor's form uses, by place; none for stages over several machines."""
    used: dict[Place, int] = {}
    for pipeline in plan["pipeline_list"]:
        for stage in pipeline["tmp_per_stage"]:
            for machines, tp in stage:
                kind, _, zone = machines[0]
                used[kind, zone] = used.get((kind, zone), 0) + (tp if len(machines) == 1 else 0)
    return used


@dataclass(frozen=True)
class LayerTable:
    """Seconds of one kind of chips under one cut: of every layer, both passes, and of the update."""

    layer_s: tuple[float, ...]
    update_s: float


@dataclass
class Tables:
    """The measurements of a checkout of Sailor for one model: times, sizes, memory and networks.

    `times` maps chip, micro-batch size and tensor parallelism to (forward, backward, update) per layer;
    `sizes` tensor parallelism to floats per layer; `network` zone, chip, number of chips, and these three of
    the receiver, to the rate.
    """

    times: Mapping[str, Any]
    sizes: Mapping[str, Any]
    network: Mapping[str, Any]
    memory_gb: Mapping[str, float]
    _send: dict[tuple[Place, int, Place, int, float], float] = field(default_factory=dict)

    @cached_property
    def num_layers(self) -> int:
        """All layers: the embedding, the decoder's and the head."""
        return len(self.sizes["1"])

    def micro_batch_sizes(self, kinds: Sequence[str]) -> tuple[int, ...]:
        """Return the sizes of micro-batches that were measured of any of these chips."""
        return tuple(sorted({int(size) for kind in kinds for size in self.times.get(kind, {})}))

    def times_of(self, kind: str, micro_batch_size: int, tp: int) -> LayerTable | None:
        """Return the measured seconds, or None where nothing was measured."""
        rows = self.times.get(kind, {}).get(str(micro_batch_size), {}).get(str(tp))
        if rows is None or str(tp) not in self.sizes:
            return None
        each = [rows[str(layer)] for layer in range(self.num_layers)]
        return LayerTable(tuple(one[0] + one[1] for one in each), each[0][2])

    def parameters(self, layer: int, tp: int) -> float:
        """Return the parameters of a layer on one chip."""
        return float(self.sizes[str(tp)][str(layer)]["params_floats"])

    def state_bytes(self, layer: int, tp: int) -> float:
        """Return the bytes that a chip holds of a layer for the whole iteration."""
        return self.parameters(layer, tp) * STATE_BYTES

    def held_bytes(self, layer: int, tp: int, micro_batch_size: int) -> float:
        """Return the bytes that one micro-batch keeps of a layer on one chip."""
        floats = self.sizes[str(tp)][str(layer)]["act_mem_floats"]
        return float(floats) * micro_batch_size * FLOAT_BYTES

    def room_bytes(self, kind: str, tp: int) -> float:
        """Return what a chip has for the model."""
        return self.memory_gb[kind] * 2**30 - PROCESS_BYTES[tp > 1]

    def message_bytes(self, layer: int, micro_batch_size: int) -> float:
        """Return what a layer hands on for one micro-batch."""
        return float(self.sizes["1"][str(layer)]["act_output_floats"]) * micro_batch_size * FLOAT_BYTES

    def bytes_per_s(self, a: Place, b: Place, chips: int = 1) -> float:
        """Return the largest rate measured from `chips` chips of one place to as many of another, 0: none."""
        row = self._pair(a, chips, b, chips)
        return float(row[1]) if row else 0.0

    def send_s(self, a: Place, a_tp: int, b: Place, b_tp: int, num_bytes: float) -> float:
        """Return the seconds of one message between stages (infinite: never measured)."""
        key = (a, a_tp, b, b_tp, num_bytes)
        if key not in self._send:
            row = self._pair(a, a_tp, b, b_tp)
            self._send[key] = self._piece_s(num_bytes, row[0]) if row else math.inf
        return self._send[key]

    def linked(self, a: Place, b: Place) -> bool:
        """Say whether anything was measured from one place to another."""
        here = self.network.get(a[1], {}).get(a[0], {})
        return any(b[0] in there.get(b[1], {}) for there in here.values())

    def ring_s(self, a: Place, b: Place, num_bytes: float, members: int) -> float:
        """Return the seconds of an all-reduce over `members`, its slowest hop from `a` to `b`."""
        row = self._pair(a, 1, b, 1)
        if row is None:
            return math.inf
        if members < 2:
            return 0.0
        whole, rest = divmod(num_bytes, BUCKET_BYTES)
        pieces = [BUCKET_BYTES] * int(whole) + ([rest] if rest else [])
        return sum(2 * (members - 1) * self._piece_s(piece / members, row[0]) for piece in pieces)

    def _pair(self, a: Place, a_chips: int, b: Place, b_chips: int) -> Any:
        here = self.network.get(a[1], {}).get(a[0], {}).get(str(a_chips), {})
        return here.get(b[1], {}).get(b[0], {}).get(str(b_chips))

    @staticmethod
    def _piece_s(num_bytes: float, rates: Sequence[float]) -> float:
        """Return seconds at a rate that was fitted as a polynomial of the logarithm of the megabytes."""
        at, rate_gb = math.log2(num_bytes / 1e6), 0.0
        for one in rates:
            rate_gb = rate_gb * at + one
        return num_bytes / 1e9 / rate_gb


@dataclass
class Sailor:
    """A checkout of Sailor. It must lie in a folder called `sailor`: its own code wants that."""

    folder: Path

    def __post_init__(self) -> None:
        if not (self.root / "Planner" / "llm_info.json").is_file() or self.folder.name != "sailor":
            raise InputError(
                f"no checkout of Sailor at {self.folder}",
                hint="give the folder that git cloned it to; it must be called `sailor`",
            )
        os.environ["SAILOR_PATH"] = str(self.folder.parent)
        if str(self.folder) not in sys.path:
            sys.path.insert(0, str(self.folder))

    @property
    def root(self) -> Path:
        """The folder of its package."""
        return self.folder / "sailor"

    def read(self, path: str) -> Any:
        """Return a JSON file of its package."""
        return json.loads((self.root / path).read_text(encoding="utf-8"))

    @cached_property
    def _profiles(self) -> Any:
        return self.read("Planner/simulations/profiles_tmp.json")

    @cached_property
    def _sizes(self) -> Any:
        return self.read("Planner/llm_info.json")

    @cached_property
    def _network(self) -> Any:
        return self.read("providers/multizone_bandwidths_het.json")

    def module(self, name: str) -> Any:
        """Return a module of its package, imported silently."""
        with quiet():
            return importlib.import_module(f"sailor.{name}")

    def tables(self, model: str) -> Tables:
        """Return its measurements of a model."""
        memory = self.module("Planner.simulations.constants").GPU_MEMORY_GB
        return Tables(self._profiles[model], self._sizes[model], self._network, memory)

    def training(self, model: str, samples: int) -> dict[str, Any]:
        """Return its configuration of a model's training, with this global batch."""
        file = {"OPT-350": "opt_350", "GPT-Neo-2.7": "gpt_neo27"}[model]
        config: dict[str, Any] = self.read(f"Planner/simulations/configs/training_config_{file}.json")
        return {**config, "global_batch_size": samples}

    def referee(self, case: Case) -> Referee:
        """Return its simulator for a case."""
        simulator = self.module("Planner.simulations.runtime_simulator").Simulator(
            str(self.folder.parent),
            self.training(case.model, case.samples),
            self._sizes,
            False,
            self._profiles,
            case.zones[0],
        )
        return Referee(simulator, case)


@dataclass
class Referee:
    """Sailor's simulator: whether a plan fits the memory, and its seconds."""

    simulator: Any
    case: Case

    def iteration_s(self, plan: Mapping[str, Any]) -> float:
        """Return the seconds of an iteration; infinite where chips, memory or measurements do not suffice."""
        if any(count > self.case.chips.get(place, 0) for place, count in used_chips(plan).items()):
            return math.inf
        with quiet():
            if not self.simulator.check_config_fits(plan):
                return math.inf
            try:
                return float(self.simulator.simulate_iteration_time(plan)[0])
            except KeyError:  # over a link that was never measured
                return math.inf


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Swallow what is printed meanwhile."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
