"""The most bandwidth over time that any choice of paths admits, by a mixed-integer program (HiGHS through scipy)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from isthmus.wan.control.wan_topology import PathRequest, WanTopology

_Row = tuple[dict[int, float], float, float]
"""Coefficients by variable, lower and upper bound."""


def _path_rows(topology: WanTopology, first: int, request: PathRequest) -> Iterator[_Row]:
    """Yield the rows of one request, whose variables begin at `first`: a path, within its bounds."""
    pipes = topology.pipes
    for node in sorted({end for pipe in pipes for end in (pipe.source, pipe.target)}):
        changes = {first + index: float((p.source == node) - (p.target == node)) for index, p in enumerate(pipes)}
        admitted = {first + len(pipes): -float((request.source == node) - (request.target == node))}
        yield changes | admitted, 0.0, 0.0
    if request.max_delay_ms < 1e9:
        yield {first + index: pipe.delay_ms for index, pipe in enumerate(pipes)}, -math.inf, request.max_delay_ms
    if request.max_jitter_ms < 1e9:
        yield {first + index: pipe.jitter_ms for index, pipe in enumerate(pipes)}, -math.inf, request.max_jitter_ms


def _capacity_rows(topology: WanTopology, requests: Sequence[PathRequest]) -> Iterator[_Row]:
    """Yield the rows of each pipe at each start of a request, for all classes together and for bulk."""
    block = len(topology.pipes) + 1
    for at_s in sorted({one.start_s for one in requests}):
        under_way = [number for number, one in enumerate(requests) if one.start_s <= at_s < one.end_s]
        bulk = [number for number in under_way if requests[number].service == "bulk"]
        for index, pipe in enumerate(topology.pipes):
            for share, some in ((1.0, under_way), (topology.bulk_share, bulk)):
                rates = {number * block + index: _rate_gbps(pipe.step_gbps, requests[number]) for number in some}
                yield rates, -math.inf, pipe.capacity_gbps * share


def exact_value(topology: WanTopology, requests: Sequence[PathRequest], limit_s: float) -> tuple[float, bool]:
    """Return the upper bound on the sum of bandwidth x duration that can be admitted, and whether it is reached.

    Variables: whether a request is admitted, and whether it uses a pipe. Flow is conserved at each node; delay and
    jitter of a path are sums; at each start of a request the rates of those under way fit into every pipe.
    """
    num_pipes, block = len(topology.pipes), len(topology.pipes) + 1
    num_variables = block * len(requests)
    rows = [row for number, request in enumerate(requests) for row in _path_rows(topology, number * block, request)]
    rows += _capacity_rows(topology, requests)
    matrix = lil_matrix((len(rows), num_variables))
    for number, (row, _, _) in enumerate(rows):
        for column, value in row.items():
            matrix[number, column] = value
    objective = np.zeros(num_variables)
    for number, request in enumerate(requests):
        objective[number * block + num_pipes] = -request.bandwidth_gbps * (request.end_s - request.start_s)
    found = milp(
        objective,
        constraints=LinearConstraint(matrix.tocsr(), [row[1] for row in rows], [row[2] for row in rows]),
        integrality=np.ones(num_variables),
        bounds=Bounds(0, 1),
        options={"time_limit": limit_s},
    )
    bound = found.mip_dual_bound if found.mip_dual_bound is not None else found.fun
    return -float(bound), found.status == 0


def _rate_gbps(step_gbps: float, request: PathRequest) -> float:
    steps = math.ceil(request.bandwidth_gbps / step_gbps - 1e-9) if step_gbps else 0
    return steps * step_gbps if step_gbps else request.bandwidth_gbps
