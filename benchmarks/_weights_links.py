"""Weights over emulated links: how long a version takes to the last site, and steps a second of virtual chips."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import torch

from benchmarks._relay_time import RelayTime
from benchmarks._rollout_virtual import VirtualRun
from benchmarks._weights_site import run_site
from benchmarks.table import Row, compared
from isthmus.core.job_parts.rl_job import RewardConfig
from isthmus.core.pool import Pool
from isthmus.data.prompts import Prompt, PromptSet
from isthmus.data.tokenizer import open_tokenizer
from isthmus.rl import LedgerConfig, summarise_ledger
from isthmus.rl.relay.chunk_table import DIGEST_BYTES, PIECE_ELEMENTS
from isthmus.rl.relay.relay_events import Coding, VersionOffered
from isthmus.rl.rewards.reward_sum import RewardSum
from isthmus.rl.rollout.engine_link import EngineLink
from isthmus.rl.rollout.engine_messages import Sampling
from isthmus.rl.rollout.rollout_coordinator import RolloutCoordinator
from isthmus.rl.rollout.rollout_limits import RolloutLimits
from isthmus.rl.rollout.rollout_store import RolloutStore
from isthmus.rl.rollout.wire_messages import EngineGreeting
from isthmus.rl.versions.version_store import VersionStore
from isthmus.rl.versions.weights_stream import PolicyVersion
from isthmus.sim import DecodeRates, DecodeSite, RolloutPipeline, WeightsWay
from isthmus.wan import dial
from isthmus.wan.emulator import ROUTES_FILE, STATISTICS_FILE, run_links

GBPS, ROUND_TRIP_MS = 0.2, 20
GOODPUT_SHARE = 0.965
"""Of the bits of an emulated wire, those that TCP's payload can have (`benchmarks.wan_links`)."""
TENSOR_ELEMENTS = 2_000_000
LIMIT_S = 120.0
RESPONSE_TOKENS, STEP_S, TRAIN_S = 128, 0.012, 2.0
BATCH, GROUP = 16, 4
END = 257


def pool_of(links: Mapping[str, tuple[float, float]]) -> Pool:
    """Return a pool of the clusters that `links` join, each named by its two ends: Gbit/s and ms of a round trip."""
    names = sorted(set("".join(links)))
    group = {"chip": "CPU-core", "nodes": 1, "chips_per_node": 1}
    return Pool.model_validate(
        {
            "clusters": [{"name": name, "owner": name, "node_groups": [group]} for name in names],
            "links": [
                {"between": list(ends), "bandwidth_gbps": gbps, "round_trip_ms": round_trip_ms}
                for ends, (gbps, round_trip_ms) in links.items()
            ],
        }
    )


class Sites:
    """Processes of `benchmarks._weights_site` behind emulated links."""

    def __init__(self, routes: dict[str, dict[str, str]], statistics: Path) -> None:
        self.routes, self._statistics = routes, statistics
        self.ports: dict[str, int] = {}
        self.staged: dict[tuple[str, int], float] = {}
        self._changed = threading.Condition()

    def read(self, name: str, site: Connection) -> None:
        """Note the times that a site sends."""
        with suppress(EOFError, OSError):
            while True:
                step, at_s, problem = site.recv()
                if problem:
                    raise RuntimeError(f"{name}: {problem}")
                with self._changed:
                    self.staged[name, step] = at_s
                    self._changed.notify_all()

    def wait(self, names: Sequence[str], step: int) -> float:
        """Return when the last of the sites had a version."""
        with self._changed:
            if not self._changed.wait_for(lambda: all((name, step) in self.staged for name in names), LIMIT_S):
                raise RuntimeError(f"version {step} is not at {names} after {LIMIT_S:g} s: {self.staged}")
            return max(self.staged[name, step] for name in names)

    def carried(self, source: str) -> int:
        """Return the bytes that left a site; the statistics are those of the last second."""
        time.sleep(1.5)
        links = json.loads(self._statistics.read_text())["links"]
        return sum(one["bytes"] for one in links if one["from"] == source)


@contextmanager
def sites(links: Mapping[str, tuple[float, float]], asks: Mapping[str, str], step_s: float = 0.0) -> Iterator[Sites]:
    """Start a site for each entry of `asks`, which names the sites that it asks before the origin a."""
    with ExitStack() as stack:
        state = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fork = multiprocessing.get_context("fork")  # of a process that has loaded all
        emulator = fork.Process(target=run_links, args=(pool_of(links), state))
        emulator.start()
        stack.callback(emulator.join, 10)
        stack.callback(emulator.terminate)
        while not (state / ROUTES_FILE).exists() and emulator.is_alive():
            time.sleep(0.02)
        found = Sites(json.loads((state / ROUTES_FILE).read_text()), state / STATISTICS_FILE)
        pipes = {}
        for name in asks:
            pipes[name], theirs = fork.Pipe()
            process = fork.Process(target=run_site, args=(name, step_s, theirs))
            process.start()
            stack.callback(process.join)
            stack.callback(process.kill)
        for name, pipe in pipes.items():
            found.ports[name] = pipe.recv()
        for name, others in asks.items():
            sources = [
                {"name": one, "cluster": one, "port": found.ports[one], "route": found.routes[name][one]}
                for one in others
            ]
            pipes[name].send(sources)
        for name, pipe in pipes.items():
            threading.Thread(target=found.read, args=(name, pipe), daemon=True).start()
        yield found


def version(num_weights: int, step: int, base: PolicyVersion | None = None, share: float = 0.01) -> PolicyVersion:
    """Return bfloat16 weights of N(0, .02), or `base` with a `share` of them one step of the last bit away."""
    made = torch.Generator().manual_seed(step)
    if base is None:
        sizes = [min(TENSOR_ELEMENTS, num_weights - at) for at in range(0, num_weights, TENSOR_ELEMENTS)]
        drawn = {f"w{n}": (torch.randn(size, generator=made) * 0.02).bfloat16() for n, size in enumerate(sizes)}
        return PolicyVersion(step, drawn)
    tensors = {}
    for name, one in base.tensors.items():
        bits = one.clone().view(torch.int16)
        places = torch.randint(len(bits), (int(len(bits) * share),), generator=made)
        bits[places] ^= 1
        tensors[name] = bits.view(torch.bfloat16)
    return PolicyVersion(step, tensors)


class WholeVersions(VersionStore):
    """Versions that are sent whole each time."""

    def newest(self) -> tuple[VersionOffered, bytes]:
        """Return the offer of the newest version, without a base."""
        offer, digests = super().newest()
        return replace(offer, bases=()), digests


class NoLedger:
    """Takes the place of the coordinator where only weights cross."""

    on_update = "keep"

    def join_engine(self, _name: str, _owner: str, _num_slots: int, _step: int, _send: object) -> str:
        """Let any engine take part."""
        return ""

    def lose_engine(self, _name: str) -> None:
        """Nothing was given to it."""

    def count_bytes(self, *_counts: object) -> None:
        """The emulated links count."""


def link_to(
    found: Sites, name: str, newest: PolicyVersion, coordinator: RolloutCoordinator, versions: VersionStore
) -> EngineLink:
    """Return the connection of the origin to a site, dialling."""
    greeting = EngineGreeting(
        run="run", sampling=Sampling(seed=1, temperature=1.0, max_response_tokens=RESPONSE_TOKENS,
        stop_tokens=frozenset({END})), dtype="bfloat16",
        parameters={key: tuple(one.shape) for key, one in newest.tensors.items()},
    )  # fmt: skip
    call = partial(dial, ("127.0.0.1", found.ports[name]), found.routes["a"][name], LIMIT_S)
    link = EngineLink(name, name, call, None, greeting, coordinator, versions)
    link.start()
    return link


def virtual_rows(_quick: bool) -> Iterator[Row]:
    """Yield the same without processes: the engine of relays on links of that rate and delay, in virtual time."""
    num_weights = 20_000_000
    line_s = 16 * num_weights / (GBPS * 1e9)
    what = f"40 MB whole to three sites, each {GBPS:g} Gbit/s, {ROUND_TRIP_MS} ms, virtual time"

    def over_line(sources: Mapping[str, tuple[str, ...]], *, one_uplink: bool) -> float:
        return RelayTime(sources, GBPS, ROUND_TRIP_MS / 2e3, num_weights, one_uplink).last_site_s() / line_s

    alone: dict[str, tuple[str, ...]] = dict.fromkeys("bcd", ())
    chain: dict[str, tuple[str, ...]] = {"b": (), "c": ("b",), "d": ("c", "b")}
    direct = over_line(alone, one_uplink=True)
    for way, sources, one_uplink, most in (
        ("a link each", alone, False, 1.1), ("one uplink and relays", chain, True, 1.15),
    ):  # fmt: skip
        ours = over_line(sources, one_uplink=one_uplink)
        yield compared(f"{what}, {way}: last site over line time", ours, "", "one uplink, no relays", direct,
                       target=f"at most {most}", met=ours <= most)  # fmt: skip


def virtual_step_rows(_quick: bool) -> Iterator[Row]:
    """Yield steps a second of virtual chips in virtual time, by the real ledger and the real size of the changes."""
    num_weights, sample = 50_000_000, 4_000_000
    old = version(sample, 0)
    new = version(0, 1, old)
    store = VersionStore(2)
    store.add(old)
    store.add(new)
    coding = Coding(new.version, old.version)
    chunks = [store.chunk(coding, number) for number in range(store.num_chunks(coding))]
    coded = sum(len(one[1]) for one in chunks if one is not None) / sample * num_weights
    digests = num_weights / PIECE_ELEMENTS * DIGEST_BYTES
    thin, lan = {"b": (0.4, 20.0), "c": (0.1, 50.0)}, {"b": (10.0, 0.2), "c": (10.0, 0.2)}
    for bound, token_s in (("training", STEP_S), ("decoding", 1.5 * STEP_S)):
        ours, near, waits = (
            VirtualRun(_pipeline(links, token_s, size, staleness), 100).run().steps_per_s
            for links, size, staleness in (
                (thin, coded + digests, 1), (lan, coded + digests, 1), (thin, 2.0 * num_weights, 0),
            )
        )  # fmt: skip
        what = (
            f"staleness 1, rollouts at 20 ms 0.4 and 50 ms 0.1 Gbit/s, 100 MB, 1 % changed, {bound} takes longer: "
            "steps a second, virtual time"
        )
        for peer, rate, least in (("one LAN", near, 0.97), ("stop and send whole weights", waits, 2.4)):
            yield compared(what, ours, "1/s", peer, rate, target=f"at least {least}", met=ours / rate >= least)


def _pipeline(
    links: Mapping[str, tuple[float, float]], token_s: float, version_bytes: float, max_staleness: int
) -> RolloutPipeline:
    """Return chips behind links, Gbit/s and ms of a round trip each, on which `version_bytes` cross for a version.

    A version is offered, asked for, sent, reported and switched to: five ways.
    """
    rates = DecodeRates(host_s=token_s, weights_s=0.0, row_s=0.0, cached_token_s=0.0)
    sites = [
        DecodeSite(
            name=name, slots=64, rates=rates, delay_s=delay_s,
            way=WeightsWay(occupied_s=5 * delay_s + 8 * version_bytes / (gbps * 1e9), delay_s=0.0),
        )
        for name, (gbps, round_trip_ms) in links.items()
        for delay_s in (round_trip_ms / 2e3,)
    ]  # fmt: skip
    return RolloutPipeline(
        train_s=TRAIN_S, steps=1, group=GROUP, batch_prompts=BATCH, max_staleness=max_staleness, prompt_tokens=0,
        lengths=tuple(range(RESPONSE_TOKENS // 4, RESPONSE_TOKENS + 1)), sites=tuple(sites),
    )  # fmt: skip


def distribution_rows(quick: bool) -> Iterator[Row]:
    """Yield how long whole weights take to three sites, by several ways, over the time of one line."""
    num_weights = 2_000_000 if quick else 20_000_000
    size_bytes = 2 * num_weights
    line_s = 8 * size_bytes / (GBPS * 1e9 * GOODPUT_SHARE)
    star = {f"a{one}": (GBPS, ROUND_TRIP_MS) for one in "bcd"}
    mesh = star | {"bc": (GBPS, ROUND_TRIP_MS), "cd": (GBPS, ROUND_TRIP_MS)}
    whole = version(num_weights, 0)
    what = f"{size_bytes / 1e6:g} MB whole to three sites, each {GBPS:g} Gbit/s, {ROUND_TRIP_MS} ms, processes"
    alone_s = _spread(star, dict.fromkeys("bcd", ""), whole, one_by_one=True)[0] / line_s
    for way, links, asks in (
        ("a link each", star, dict.fromkeys("bcd", "")),
        ("one uplink and relays", mesh, {"b": "", "c": "b", "d": "c"}),
    ):
        spent_s, sent_bytes = _spread(links, asks, whole)
        found = spent_s / line_s
        yield compared(f"{what}, {way}: last site over line time", found, "", "one site after another", alone_s)
        if way != "a link each":
            share = sent_bytes / size_bytes
            yield Row(what=f"{what}, {way}: bytes out of the origin over the version's", ours=share, unit="",
                      target="at most 1.05", met=share <= 1.05)  # fmt: skip


def _spread(
    links: Mapping[str, tuple[float, float]], asks: Mapping[str, str], whole: PolicyVersion, *, one_by_one: bool = False
) -> tuple[float, int]:
    """Return the seconds until the last site has a version, and the bytes that left the origin."""
    whole.version  # noqa: B018 - its digests belong to training, which hands them over
    with sites(links, asks) as found:
        versions = VersionStore(2)
        time.sleep(1.0)
        start_s = time.monotonic()
        versions.add(whole)
        opened = []
        for name in asks:
            opened.append(link_to(found, name, whole, cast("RolloutCoordinator", NoLedger()), versions))
            if one_by_one:
                found.wait([name], 0)
        spent_s = found.wait(list(asks), 0) - start_s
        sent_bytes = found.carried("a")
        for link in opened:
            link.close()
        for link in opened:
            link.join(5.0)
    return spent_s, sent_bytes


def step_rows(quick: bool) -> Iterator[Row]:
    """Yield steps a second of virtual chips over thin links, against one LAN and against whole weights sent between."""
    num_weights, steps = (2_000_000, 5) if quick else (50_000_000, 12)
    thin, lan = {"ab": (0.4, 20.0), "ac": (0.1, 50.0)}, {"ab": (10.0, 0.2), "ac": (10.0, 0.2)}
    first = version(num_weights, 0)
    what = (
        f"staleness 1, rollouts at 20 ms 0.4 and 50 ms 0.1 Gbit/s, {2 * num_weights / 1e6:g} MB, 1 % changed, processes"
    )
    ours = _rate(thin, first, steps, VersionStore(3), staleness=1)
    near = _rate(lan, first, steps, VersionStore(3), staleness=1)
    waits = _rate(thin, first, max(steps // 3, 3), WholeVersions(3), staleness=0)
    for peer, rate in (("one LAN", near), ("stop and send whole weights", waits)):
        yield compared(f"{what}: steps a second of virtual chips", ours, "1/s", peer, rate)


def _rate(
    links: Mapping[str, tuple[float, float]],
    first: PolicyVersion,
    steps: int,
    versions: VersionStore,
    *,
    staleness: int,
) -> float:
    """Return steps a second after the first one; a step trains on the samples of two sites for `TRAIN_S`."""
    with ExitStack() as stack:
        found = stack.enter_context(sites(links, {"b": "", "c": ""}, STEP_S))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        coordinator = _coordinator(folder, staleness)
        newest = first
        versions.add(newest)
        coordinator.begin(0)
        opened = [link_to(found, name, newest, coordinator, versions) for name in "bc"]
        found.wait("bc", 0)
        times_s = []
        for step in range(steps):
            coordinator.request_batch(step)
            while coordinator.wait_batch(1.0) is None:
                pass
            ends_s = time.monotonic() + TRAIN_S
            newest = version(0, step + 1, newest)
            newest.version  # noqa: B018 - computed while the virtual chip trains
            time.sleep(max(0.0, ends_s - time.monotonic()))
            versions.add(newest)
            coordinator.end_step(step, is_last=step + 1 == steps)
            times_s.append(time.monotonic())
        for link in opened:
            link.close()
        for link in opened:
            link.join(5.0)
        told = summarise_ledger(coordinator.ledger.state)
        if told.lost or told.doubled or max(told.staleness) > staleness:
            raise RuntimeError(f"the ledger has {told}")
        coordinator.close()
    return (len(times_s) - 1) / (times_s[-1] - times_s[0])


def _coordinator(folder: Path, staleness: int) -> RolloutCoordinator:
    config = LedgerConfig(
        group=GROUP, batch_prompts=BATCH, max_staleness=staleness, on_update="keep", filter_groups=False
    )  # fmt: skip
    limits = RolloutLimits(max_response_tokens=RESPONSE_TOKENS, vocab_size=300, penalty_of=_no_penalty)
    prompts = [Prompt(text=f"{n}", tokens=(n % 200,), answer="") for n in range(1000)]
    data = PromptSet(prompts, (), open_tokenizer("bytes"), "bytes", 0)
    return RolloutCoordinator(config, limits, data, RewardSum((RewardConfig(exact=True),)), RolloutStore(folder))


def _no_penalty(_num_tokens: int) -> float:
    return 0.0


def link_rows(quick: bool) -> list[Row]:
    """Return the rows in virtual time."""
    torch.set_num_threads(1)
    return [*virtual_rows(quick), *virtual_step_rows(quick)]


def site_rows(quick: bool) -> list[Row]:
    """Return the rows of processes."""
    torch.set_num_threads(1)
    return [*distribution_rows(quick), *step_rows(quick)]
