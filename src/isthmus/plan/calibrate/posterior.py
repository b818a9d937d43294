"""`find_posterior`: the most probable parameters for measured runs, their covariance, and the scatter of the runs.

The model of a measurement is log(measured) = log(modelled at the parameters) + effect of its shape + scatter. The
logarithms of the parameters have a normal prior, so parameters stay positive; effects of shapes have a common, unknown
standard deviation. Scatter is Student-t, so that single runs which differ much hardly count. The maximum of the
posterior is found by Gauss-Newton with Levenberg-Marquardt damping; the inverse curvature there is the covariance
(Laplace). Scatter and shapes'
deviation follow from the evidence: what the effective number of parameters leaves over. Source: D. MacKay, "Bayesian
interpolation", Neural Computation 4 (1992). Shapes are eliminated first, so that their number costs little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_SOLVER_STEPS = 12
"""Maximum number of solver steps of a round."""

EVIDENCE_ROUNDS = 5
"""Most rounds of: fit, then estimate scatter and shapes' deviation from its residuals."""

DEGREES_OF_FREEDOM = 4.0
"""Of the Student-t distribution of the scatter."""

SCATTER_PER_SCALE = 1.3
"""Scatter over the scale of that distribution: as many runs are within 1.645 times the scatter, 90 %, as if normal."""

INFORMATION = 0.6
"""Weight of a run's likelihood: with it, runs of normal scatter inform as much as a normal likelihood says."""

MIN_SCATTER = 0.01
"""Least relative error that is assumed for any measured or modelled time."""

SCATTER_PRIOR_RUNS = 3.0
"""Number of runs that the prior scatter, and the prior deviation of shapes, counts as."""

Matrix = list[list[float]]


@dataclass(frozen=True, kw_only=True)
class MeasuredValue:
    """A measurement, its shape (an index, None: of no shape), and its model.

    `predict(at, effect)` is the modelled value at the logarithms of the parameters, (num_parameters,), with the
    logarithm of its shape's effect.
    """

    measured: float
    predict: Callable[[Sequence[float], float], float]
    shape: int | None = None


@dataclass(frozen=True, kw_only=True)
class Prior:
    """Means of the parameters' logarithms, (n,), their covariance, (n, n), scatter and deviation of shapes' effects."""

    mean: tuple[float, ...]
    covariance: Matrix
    scatter_std: float
    shape_std: float


@dataclass(frozen=True, kw_only=True)
class Posterior:
    """The most probable logarithms, (n,), with covariance, (n, n), and what was left over."""

    mean: tuple[float, ...]
    covariance: Matrix
    shapes: tuple[float, ...]
    """Effect of each shape, (num_shapes,)."""
    shape_covariance: tuple[tuple[float, ...], ...]
    """Covariance of each shape's effect with the parameters, (num_shapes, n)."""
    shape_variance: tuple[float, ...]
    scatter_std: float
    shape_std: float
    """Deviation of the effects of shapes, seen or not."""
    gradients: Matrix
    """Derivatives of the logarithm of each run's model by the parameters, (num_runs, n)."""


def find_posterior(runs: Sequence[MeasuredValue], prior: Prior) -> Posterior:
    """Return the posterior of `runs`, with positive measurements, under `prior`."""
    problem = _Problem(runs, prior)
    for _ in range(EVIDENCE_ROUNDS):
        before = problem.scatter_std, problem.shape_std
        problem.solve()
        problem.update_scales()
        if all(
            abs(math.log(a / b)) < 0.05 for a, b in zip(before, (problem.scatter_std, problem.shape_std), strict=True)
        ):
            break
    return problem.posterior()


@dataclass(frozen=True)
class _Normal:
    """The normal equations of a point: of the parameters (n, n), of each shape, and between the two."""

    curvature: Matrix
    gradient: list[float]
    shape_curvature: list[float]
    shape_gradient: list[float]
    cross: Matrix

    def reduced(self, damping_factor: float) -> tuple[Matrix, list[float]]:
        """Return curvature and gradient of the parameters with the shapes eliminated."""
        size, grow = range(len(self.gradient)), 1 + damping_factor
        curvature = [[v * grow if i == j else v for j, v in enumerate(row)] for i, row in enumerate(self.curvature)]
        gradient = list(self.gradient)
        for cross, own, slope in zip(self.cross, self.shape_curvature, self.shape_gradient, strict=True):
            for i in size:
                if cross[i]:
                    gradient[i] -= cross[i] * slope / (own * grow)
                    for j in size:
                        curvature[i][j] -= cross[i] * cross[j] / (own * grow)
        return curvature, gradient

    def step(self, damping_factor: float) -> tuple[list[float], list[float]]:
        """Return the damped step of the parameters and of the shapes."""
        steps = solve_linear(*self.reduced(damping_factor))
        rows = zip(self.cross, self.shape_curvature, self.shape_gradient, strict=True)
        shapes = [(slope - _dot(cross, steps)) / (own * (1 + damping_factor)) for cross, own, slope in rows]
        return steps, shapes


class _Problem:
    """The posterior as a function of parameters and shapes; `errors` are log(modelled / measured), (num_runs,)."""

    def __init__(self, runs: Sequence[MeasuredValue], prior: Prior) -> None:
        self.runs, self.prior = runs, prior
        self.num_shapes = 1 + max((run.shape for run in runs if run.shape is not None), default=-1)
        self.precision = invert(prior.covariance)
        self.at, self.shapes = list(prior.mean), [0.0] * self.num_shapes
        self.scatter_std, self.shape_std = max(prior.scatter_std, MIN_SCATTER), max(prior.shape_std, 1e-3)
        self._errors = self.log_errors(self.at, self.shapes)
        self._equations: _Normal | None = None
        self._gradients: Matrix = []

    @property
    def scale(self) -> float:
        """Scale of the distribution of the scatter."""
        return self.scatter_std / SCATTER_PER_SCALE

    def log_errors(self, at: Sequence[float], shapes: Sequence[float]) -> list[float]:
        """Return log(modelled / measured) of each run, (num_runs,)."""
        return [math.log(run.predict(at, self._effect(run, shapes)) / run.measured) for run in self.runs]

    def _effect(self, run: MeasuredValue, shapes: Sequence[float]) -> float:
        return 0.0 if run.shape is None else shapes[run.shape]

    def cost(self, at: Sequence[float], shapes: Sequence[float], errors: Sequence[float]) -> float:
        """Return minus twice the logarithm of the posterior: Student's loss of the runs, squares of the prior."""
        away = [x - x0 for x, x0 in zip(at, self.prior.mean, strict=True)]
        prior = sum(a * _dot(row, away) for a, row in zip(away, self.precision, strict=True))
        return (
            sum(INFORMATION * _loss(error / self.scale) for error in errors)
            + prior
            + sum((effect / self.shape_std) ** 2 for effect in shapes)
        )

    def derivatives(self, errors: Sequence[float]) -> tuple[Matrix, list[float]]:
        """Return the derivatives of the errors by the parameters, (num_runs, n), and by their shapes, (num_runs,)."""
        step = 1e-3
        rows = [[0.0] * len(self.at) for _ in self.runs]
        for index in range(len(self.at)):
            moved = [x + step * (i == index) for i, x in enumerate(self.at)]
            for row, before, after in zip(rows, errors, self.log_errors(moved, self.shapes), strict=True):
                row[index] = (after - before) / step
        by_shape = [0.0] * len(self.runs)
        if self.num_shapes:
            more = [effect + step for effect in self.shapes]
            by_shape = [(b - a) / step for a, b in zip(errors, self.log_errors(self.at, more), strict=True)]
        return rows, by_shape

    def normal_equations(self, errors: Sequence[float]) -> _Normal:
        """Return the equations of half the cost at the present point."""
        size, n = range(len(self.at)), len(self.at)
        away = [x - x0 for x, x0 in zip(self.at, self.prior.mean, strict=True)]
        curvature = [list(row) for row in self.precision]
        gradient = [_dot(row, away) for row in self.precision]
        own = [1 / self.shape_std**2] * self.num_shapes
        slope = [effect / self.shape_std**2 for effect in self.shapes]
        cross = [[0.0] * n for _ in range(self.num_shapes)]
        rows, by_shape = self.derivatives(errors)
        self._gradients = rows
        for run, error, row, factor in zip(self.runs, errors, rows, by_shape, strict=True):
            weight = INFORMATION * _weight(error / self.scale) / self.scale**2
            for i in size:
                gradient[i] += weight * row[i] * error
                for j in size:
                    curvature[i][j] += weight * row[i] * row[j]
            if run.shape is not None:
                own[run.shape] += weight * factor**2
                slope[run.shape] += weight * factor * error
                for i in size:
                    cross[run.shape][i] += weight * factor * row[i]
        return _Normal(curvature, gradient, own, slope, cross)

    def solve(self) -> None:
        """Move to the maximum of the posterior for the present scatter."""
        damping_factor, cost = 1e-3, self.cost(self.at, self.shapes, self._errors)
        for _ in range(MAX_SOLVER_STEPS):
            # Step 1: linearise at the current point.
            equations = self._equations = self.normal_equations(self._errors)
            # Step 2: raise the damping until a step lowers the cost.
            for _ in range(8):
                steps, effects = equations.step(damping_factor)
                at = [x - max(-1.0, min(1.0, s)) for x, s in zip(self.at, steps, strict=True)]
                shapes = [x - max(-1.0, min(1.0, s)) for x, s in zip(self.shapes, effects, strict=True)]
                trial = self.log_errors(at, shapes)
                trial_cost = self.cost(at, shapes, trial)
                if trial_cost <= cost:
                    break
                damping_factor *= 6
            else:
                return
            # Step 3: accept the step, lower the damping, and stop once the cost has converged.
            small = cost - trial_cost < 1e-3 * (1 + cost)
            self.at, self.shapes, self._errors, cost, damping_factor = at, shapes, trial, trial_cost, damping_factor / 4
            if small:
                return

    def covariances(self) -> tuple[Matrix, Matrix, list[float]]:
        """Return the covariance of the parameters, of shapes with parameters, and the variance of shapes."""
        equations = self._equations or self.normal_equations(self._errors)
        curvature, _ = equations.reduced(0.0)
        covariance = invert(curvature)
        mixed, variances = [], []
        for cross, own in zip(equations.cross, equations.shape_curvature, strict=True):
            row = [-_dot(cross, column) / own for column in covariance]
            mixed.append(row)
            variances.append(1 / own - _dot(cross, row) / own)
        return covariance, mixed, variances

    def update_scales(self) -> None:
        """Estimate scatter and deviation of shapes: squares left over, per run that no parameter has used up."""
        covariance, _, variances = self.covariances()
        determined = len(self.at) - sum(_dot(a, b) for a, b in zip(covariance, self.precision, strict=True))
        determined += sum(1 - variance / self.shape_std**2 for variance in variances)
        left = sum(_weight(error / self.scale) * error**2 for error in self._errors)
        known = SCATTER_PRIOR_RUNS * (max(self.prior.scatter_std, MIN_SCATTER) / SCATTER_PER_SCALE) ** 2
        free = max(0.0, len(self.runs) - determined) + SCATTER_PRIOR_RUNS
        self.scatter_std = max(MIN_SCATTER, SCATTER_PER_SCALE * math.sqrt((left + known) / free))
        if self.num_shapes:
            squares = sum(effect**2 + variance for effect, variance in zip(self.shapes, variances, strict=True))
            squares += SCATTER_PRIOR_RUNS * self.prior.shape_std**2
            self.shape_std = max(1e-3, math.sqrt(squares / (self.num_shapes + SCATTER_PRIOR_RUNS)))

    def posterior(self) -> Posterior:
        """Return the posterior at the present point."""
        covariance, mixed, variances = self.covariances()
        return Posterior(
            mean=tuple(self.at), covariance=covariance, shapes=tuple(self.shapes),
            shape_covariance=tuple(map(tuple, mixed)), shape_variance=tuple(variances),
            scatter_std=self.scatter_std, shape_std=self.shape_std, gradients=self._gradients,
        )  # fmt: skip


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _loss(error_std: float) -> float:
    """Return minus twice the logarithm of Student's density at `error_std` scales."""
    return (DEGREES_OF_FREEDOM + 1) * math.log1p(error_std**2 / DEGREES_OF_FREEDOM)


def _weight(error_std: float) -> float:
    """Return the weight of an error of `error_std` scales, relative to that of one without scatter."""
    return (DEGREES_OF_FREEDOM + 1) / (DEGREES_OF_FREEDOM + error_std**2)


def invert(matrix: Matrix) -> Matrix:
    """Return the inverse of a regular, symmetric matrix, (n, n)."""
    size = range(len(matrix))
    columns = [solve_linear(matrix, [float(i == j) for j in size]) for i in size]
    return [[(columns[i][j] + columns[j][i]) / 2 for j in size] for i in size]


def solve_linear(matrix: Matrix, right: Sequence[float]) -> list[float]:
    """Return the solution of `matrix` x = `right`, (n,), by elimination with partial pivoting."""
    size = len(right)
    rows = [[*row, b] for row, b in zip(matrix, right, strict=True)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda i: abs(rows[i][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for row in rows[column + 1 :]:
            factor = row[column] / rows[column][column]
            if factor:
                for j in range(column, size + 1):
                    row[j] -= factor * rows[column][j]
    found = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(rows[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (rows[i][size] - rest) / rows[i][i]
    return found
