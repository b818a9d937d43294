"""Networks and requests of `benchmarks.wan_control`, by seed."""

from __future__ import annotations

from random import Random

from isthmus.wan.control.wan_topology import PathRequest, WanNode, WanPipe, WanTopology

HORIZON_S = 3_600.0


def large_topology(rng: Random, num_domains: int = 20, nodes_a_domain: int = 50) -> WanTopology:
    """Return domains, each a ring with chords, joined in a ring with chords; a fifth of the nodes are edges.

    Pipes come in pairs of directions: packets 100 Gbit/s, TDM 100 in steps of 1.25, wavelengths 400 as spare.
    """
    pipes: list[WanPipe] = []
    nodes: list[WanNode] = []

    def join(one: str, other: str, domain: str, layer: str, capacity_gbps: float) -> None:
        delay_ms, jitter_ms = round(rng.uniform(0.2, 3.0), 3), round(rng.uniform(0.0, 0.05), 4)
        for source, target in ((one, other), (other, one)):
            pipes.append(
                WanPipe(
                    name=f"p{len(pipes)}", source=source, target=target, layer=layer, domain=domain,
                    capacity_gbps=capacity_gbps, step_gbps=1.25 if layer == "tdm" else 0.0,
                    delay_ms=delay_ms, jitter_ms=jitter_ms, loss=rng.choice([0.0, 1e-6, 1e-5]),
                )
            )  # fmt: skip

    for domain in range(num_domains):
        names = [f"d{domain}n{number}" for number in range(nodes_a_domain)]
        nodes += [WanNode(name=one, role="edge" if number % 5 == 0 else "core") for number, one in enumerate(names)]
        for number, one in enumerate(names):
            join(one, names[(number + 1) % len(names)], f"d{domain}", "packet", 100.0)
        for _ in range(nodes_a_domain // 2):
            layer = rng.choice(["packet", "tdm"])
            join(*rng.sample(names, 2), f"d{domain}", layer, 100.0)
        for _ in range(3):
            join(*rng.sample(names, 2), f"d{domain}", "wavelength", 400.0)
        for other in ((domain + 1) % num_domains, rng.randrange(num_domains)):
            if other != domain:
                for _ in range(2):
                    far = f"d{other}n{rng.randrange(nodes_a_domain)}"
                    join(rng.choice(names), far, f"d{domain}", "packet", 400.0)
    return WanTopology(pipes=tuple(pipes), nodes=tuple(nodes))


def large_request(rng: Random, edges: list[str], number: int, bandwidths_gbps: tuple[float, ...]) -> PathRequest:
    """Return a request between two edges for some minutes of an hour, with bounds on delay and, of some, jitter."""
    source, target = rng.sample(edges, 2)
    start_s = rng.uniform(0, HORIZON_S)
    return PathRequest(
        name=f"r{number}", source=source, target=target, bandwidth_gbps=rng.choice(bandwidths_gbps),
        service=rng.choice(["training", "training", "bulk"]), max_delay_ms=rng.uniform(40, 80),
        max_jitter_ms=rng.choice([1e9, 1e9, 2.0]), start_s=start_s, end_s=start_s + rng.uniform(60, 900),
    )  # fmt: skip


def small_topology(rng: Random) -> WanTopology:
    """Return 7 nodes in a ring with 4 chords, 10 Gbit/s, packets or TDM in steps of 1 Gbit/s."""
    nodes = [f"n{number}" for number in range(7)]
    pairs = [(one, nodes[(number + 1) % 7]) for number, one in enumerate(nodes)]
    pairs += [(one, other) for one, other in (rng.sample(nodes, 2) for _ in range(4))]
    pipes = []
    for one, other in pairs:
        layer, delay_ms = rng.choice(["packet", "packet", "tdm"]), rng.uniform(1, 5)
        for source, target in ((one, other), (other, one)):
            pipes.append(
                WanPipe(
                    name=f"p{len(pipes)}", source=source, target=target, layer=layer, capacity_gbps=10.0,
                    step_gbps=1.0 if layer == "tdm" else 0.0, delay_ms=delay_ms, jitter_ms=rng.uniform(0, 0.5),
                )
            )  # fmt: skip
    return WanTopology(pipes=tuple(pipes))


def small_batch(rng: Random, topology: WanTopology, count: int = 36) -> list[PathRequest]:
    """Return more requests than a small network has room for."""
    nodes = sorted({pipe.source for pipe in topology.pipes})
    found = []
    for number in range(count):
        source, target = rng.sample(nodes, 2)
        start_s = rng.choice([0.0, 10.0, 20.0])
        found.append(
            PathRequest(
                name=f"r{number}", source=source, target=target, bandwidth_gbps=rng.uniform(1.5, 6.0),
                max_delay_ms=rng.uniform(6, 15), max_jitter_ms=rng.choice([1e9, 1.0]),
                start_s=start_s, end_s=start_s + rng.choice([10.0, 20.0]),
            )
        )  # fmt: skip
    return found
