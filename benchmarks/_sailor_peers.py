"""The peers that Sailor ships, run on a `Case` with their defaults: Sailor, AMP, FlashFlex, Metis and DTFM.

Each runs in a process of its own, forked where its tables stand ready, so that its seconds and memory are
its own. What it returns is its plans in Sailor's form, in its own order.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import json
import os
import pickle
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks._sailor import Case, Sailor
from isthmus.core.errors import InputError

Plans = list[dict[str, Any]]


@dataclass(frozen=True)
class Effort:
    """What a planner answered, None where it failed or ran too long, and its CPU seconds and peak bytes."""

    plans: Plans | None
    cpu_s: float
    peak_bytes: float


def measured(plan: Callable[[], Plans], limit_s: float, keep: int) -> Effort:
    """Return the first `keep` plans that `plan` gives in a process of its own, ended at `limit_s` of CPU."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        status = 1
        with contextlib.suppress(Exception):
            silence()
            resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s) + 1, int(limit_s) + 2))
            before = resource.getrusage(resource.RUSAGE_SELF)
            plans = list(itertools.islice(plan(), keep))
            after = resource.getrusage(resource.RUSAGE_SELF)
            cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump((plain(plans), cpu_s, after.ru_maxrss * 1024), pipe)
            status = 0
        os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    _, _, used = os.wait4(child, 0)
    if not data:
        return Effort(None, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)
    return Effort(*pickle.loads(data))


def plain(plans: Plans) -> Plans:
    """Return plans as lists, numbers and strings, whatever classes they are bound to."""
    found = []
    for one in plans:
        pipelines = [
            {**each, "layers_per_stage": [list(map(int, stage)) for stage in each["layers_per_stage"]]}
            for each in one["pipeline_list"]
        ]
        found.append({"mbs": int(one["mbs"]), "used_gpus": one["used_gpus"], "pipeline_list": pipelines})
    return found


def silence() -> None:
    """Send all that this process prints, C++ included, nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    sys.stdout.flush()
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


@dataclass
class Peers:
    """The planners of one checkout. `built` is where its compiled planner lies."""

    sailor: Sailor
    built: Path

    @cached_property
    def library(self) -> Any:
        """Sailor's planner as its own build made it."""
        if not list(self.built.glob("libplanner*.so")):
            raise InputError(
                f"no libplanner of Sailor's in {self.built}",
                hint="build Sailor's planner as its own notes say, for this Python, and give the folder",
            )
        sys.path.insert(0, str(self.built))
        return importlib.import_module("libplanner")

    def planner(self, case: Case, most_chips: int) -> Any:
        """Return Sailor's planner for cases of this model, batch, kinds of chips and zones, tables ready."""
        module = self.sailor.module("Planner.sailor_planner.cpp_src.planner")
        quotas = {kind: dict.fromkeys(case.zones, 0) for kind in case.kinds}
        quotas[case.kinds[0]][case.zones[0]] = most_chips + 1
        root = self.sailor.root
        with tempfile.TemporaryDirectory() as folder:
            files = {"quotas": quotas, "training": self.sailor.training(case.model, case.samples)}
            for name, content in files.items():
                Path(folder, name).write_text(json.dumps(content), encoding="utf-8")
            with mute():
                wrapper = object.__new__(module.SailorPlanner)
                wrapper.available_gpus = sorted(quotas)
                wrapper.planner = self.library.SailorPlanner(
                    f"{root}/Planner/sailor_planner/profiles/{case.model}/",
                    f"{root}/providers/multizone_bandwidths_het.json",
                    f"{folder}/training",
                    f"{root}/Planner/llm_info.json",
                    f"{root}/providers/gcp/communication_cost.json",
                    True,
                    False,
                    f"{folder}/quotas",
                    "throughput",
                )
        return wrapper

    def sailor_plans(self, case: Case, planner: Any) -> Plans:
        """Return Sailor's plans."""
        chips = {f"{kind}_{zone}": count for (kind, zone), count in case.chips.items()}
        return list(planner.get_sorted_plans(cluster_config={**chips, "max_cost": 0.0, "min_throughput": 0.0}))

    def other_plans(self, name: str, case: Case) -> Plans:
        """Return the plans of AMP, FlashFlex or Metis (cases of one zone), or DTFM (of one kind of chips)."""
        root, training = self.sailor.root, self.sailor.training(case.model, case.samples)
        base = "Planner.baselines"
        if name == "DTFM":
            return self._dtfm_plans(case, training)
        cluster = self._cluster(case)
        if name == "AMP":
            profiles = f"{root}/Planner/baselines/AMP/profiles/{case.model}"
            planner = self.sailor.module(f"{base}.AMP.amp_planner").AMPPlanner(profiles)
        elif name == "FlashFlex":
            machines = f"{root}/Planner/baselines/FlashFlex/src/machine_amounts.json"
            planner = self.sailor.module(f"{base}.FlashFlex.flashflex_planner").FlashFlexPlanner(machines)
        else:
            profiles = f"{root}/Planner/baselines/Metis/profiles/{case.model}"
            with written(training) as file:
                planner = self.sailor.module(f"{base}.Metis.metis_planner").MetisPlanner(profiles, file)
                return list(planner.get_sorted_plans(cluster_config=cluster, training_config=training))
        return list(planner.get_sorted_plans(cluster_config=cluster, training_config=training))

    def _cluster(self, case: Case) -> dict[str, Any]:
        known = self.sailor.read("Planner/simulations/configs/basic_cluster_config.json")
        cluster: dict[str, Any] = {
            kind: {
                "num_nodes": count // case.chips_per_node,
                "gpus_per_node": case.chips_per_node,
                "mem_per_gpu": known[kind]["mem_per_gpu"],
            }
            for (kind, _), count in case.chips.items()
        }
        return {**cluster, "zone": case.zones[0]}

    def _dtfm_plans(self, case: Case, training: Mapping[str, Any]) -> Plans:
        module = self.sailor.module("Planner.baselines.DTFM.dtfm_planner")
        chips: dict[str, Any] = {f"{kind}_{zone}": count for (kind, zone), count in case.chips.items()}
        chips["gpu_types"] = list(case.kinds)
        chips["gpus_per_node"] = dict.fromkeys(case.kinds, case.chips_per_node)
        sizes = self.sailor.read("Planner/llm_info.json")
        with written(training) as file:
            planner = module.DTFMPlanner("", file, sizes, False)
        return list(planner.get_sorted_plans(cluster_config=chips, training_config=dict(training)))


@contextlib.contextmanager
def written(content: object) -> Iterator[str]:
    """Write JSON to a file that is there meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "content.json")
        path.write_text(json.dumps(content), encoding="utf-8")
        yield str(path)


@contextlib.contextmanager
def mute() -> Iterator[None]:
    """Send what C++ prints nowhere meanwhile."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(nowhere)
        os.close(kept)
