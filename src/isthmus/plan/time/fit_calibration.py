"""`fit_calibration`: fits time-model parameters to measured times by least squares, with uncertainties.

The fit compares logarithms of times, so errors are relative, and varies logarithms of parameters, so they
stay positive. The prior (each parameter's value and uncertainty) enters as one more measurement, so
parameters that the runs do not determine keep their defaults. Huber's loss limits the weight of outliers. The
solver is Gauss-Newton with Levenberg-Marquardt damping and finite differences, in plain Python since
parameters are few.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isthmus.core.errors import InputError
from isthmus.plan.time.calibration import Calibration, FittedParameter
from isthmus.plan.time.time_model_parameters import TIME_MODEL_PARAMETERS

MAX_SOLVER_STEPS = 12
"""Maximum number of solver steps."""

SCATTER_ROUNDS = 3
"""Number of times that the scatter of the runs is estimated and the fit repeated."""

HUBER_THRESHOLD = 1.5
"""Residuals above this number of standard deviations count linearly instead of squared."""

MIN_RESIDUAL = 0.01
"""Least relative error that is assumed for any measured or modelled iteration time."""

Matrix = list[list[float]]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """A measured time and its model."""

    name: str
    measured_s: float
    predict_s: Callable[[Calibration], float]
    """Predicts the time in seconds under a calibration."""
    shape_scope: str = ""
    """Scope of the layers' shape (`shape_scope`), if they all have the same."""


def fit_calibration(
    start: Calibration, keys: Sequence[str], runs: Sequence[Observation], *, name: str, source: str
) -> Calibration:
    """Return `start` with `keys` fitted to `runs`, their uncertainties, and the runs' names.

    With more runs than keys, the scatter of the runs becomes the residual. Otherwise the fit matches the runs
    to measurement accuracy and keeps the residual of `start`, as the runs do not show the model's error.
    Raises `InputError` without runs, or for a time that is not positive.
    """
    if not runs or any(not run.measured_s > 0 for run in runs):
        raise InputError("no runs with a positive time", hint="give at least one run with a time above 0")
    problem = _LeastSquares(start, tuple(keys), tuple(runs))
    at, sigma, residual = problem.start, MIN_RESIDUAL, start.residual
    if len(runs) > len(keys):
        sigma = max(start.residual, MIN_RESIDUAL)
        for _ in range(SCATTER_ROUNDS):  # each with the scatter of the previous fit
            at = problem.solve(at, sigma)
            residual = sigma = problem.residual_std(at)
    else:
        at = problem.solve(at, sigma)
    deviations = problem.parameter_std(at, sigma)
    fitted = {
        key: FittedParameter(value=math.exp(x), relative=deviation)
        for key, x, deviation in zip(keys, at, deviations, strict=True)
    }
    return start.model_copy(
        update={
            "name": name,
            "source": source,
            "fitted_on": (*start.fitted_on, *(run.name for run in runs)),
            "parameters": {**start.parameters, **fitted},
            "residual": residual,
        }
    )


def fit_shapes(calibration: Calibration, runs: Sequence[Observation]) -> Calibration:
    """Return `calibration`, already fitted on `runs`, with a factor for every shape of two or more of them.

    Libraries choose kernels by shape, which a roofline cannot model. The factor is the mean error of the
    shape's runs, shrunk towards 1 according to their scatter; a single run is not enough. The residual stays
    that of the fit, which holds for shapes that were not measured.
    """
    errors_by_shape: dict[str, list[float]] = {}
    for run in runs:
        if run.shape_scope:
            errors_by_shape.setdefault(run.shape_scope, []).append(
                math.log(run.measured_s / run.predict_s(calibration))
            )
    groups = {shape: errors for shape, errors in errors_by_shape.items() if len(errors) > 1}
    if not groups:
        return calibration
    scatter, belief = _within_group_std(list(groups.values())), TIME_MODEL_PARAMETERS["shape_time"].relative
    parameters = dict(calibration.parameters)
    for shape, errors in groups.items():
        precision = len(errors) / scatter**2 + 1 / belief**2
        factor = sum(errors) / scatter**2 / precision
        parameters[f"{shape}/shape_time"] = FittedParameter(value=math.exp(factor), relative=precision**-0.5)
    return calibration.model_copy(update={"parameters": parameters})


def _within_group_std(groups: Sequence[Sequence[float]]) -> float:
    """Return the standard deviation of errors within groups of two or more."""
    free = sum(len(group) - 1 for group in groups)
    total = sum((x - sum(group) / len(group)) ** 2 for group in groups for x in group)
    return max(MIN_RESIDUAL, math.sqrt(total / free))


class _LeastSquares:
    """The least-squares problem over runs and prior, as a function of the logarithms of the parameters.

    `at` has shape (num_keys,), `log_errors` (num_runs,); `sigma` is the standard deviation of the errors.
    """

    def __init__(self, start: Calibration, keys: tuple[str, ...], runs: tuple[Observation, ...]) -> None:
        self.calibration, self.keys, self.runs = start, keys, runs
        parts = [key.rpartition("/") for key in keys]
        self.start = [math.log(start.value(name, scope)) for scope, _, name in parts]
        self.prior_std = [max(start.relative_uncertainty(name, scope), 1e-6) for scope, _, name in parts]

    def log_errors(self, at: Sequence[float]) -> list[float]:
        """Return log(modelled / measured time) of each run, (num_runs,)."""
        values = {key: math.exp(x) for key, x in zip(self.keys, at, strict=True)}
        trial = self.calibration.with_values(values)
        return [math.log(run.predict_s(trial) / run.measured_s) for run in self.runs]

    def cost(self, at: Sequence[float], errors: Sequence[float], sigma: float) -> float:
        """Return Huber's loss over the runs plus squares over the prior."""
        runs = sum(_huber_loss(error / sigma) for error in errors)
        return runs + sum(((x - x0) / b) ** 2 for x, x0, b in zip(at, self.start, self.prior_std, strict=True))

    def jacobian(self, at: Sequence[float], errors: Sequence[float]) -> Matrix:
        """Return the derivatives of the errors, (num_keys, num_runs)."""
        step, rows = 1e-3, []
        for index in range(len(at)):
            moved = [x + step * (i == index) for i, x in enumerate(at)]
            rows.append([(b - a) / step for a, b in zip(errors, self.log_errors(moved), strict=True)])
        return rows

    def solve(self, start: Sequence[float], sigma: float) -> list[float]:
        """Return the minimum of the cost, starting at `start`, (num_keys,)."""
        at, damping = list(start), 1e-3
        errors = self.log_errors(at)
        cost = self.cost(at, errors, sigma)
        for _ in range(MAX_SOLVER_STEPS):
            # Step 1: linearise at the current point.
            curvature, gradient = self._normal_equations(at, errors, sigma)
            # Step 2: raise the damping until a step lowers the cost.
            for _ in range(8):
                damped = [
                    [v * (1 + damping) if i == j else v for j, v in enumerate(row)] for i, row in enumerate(curvature)
                ]
                steps = solve_linear(damped, gradient)
                trial = [x - max(-1.0, min(1.0, s)) for x, s in zip(at, steps, strict=True)]
                trial_errors = self.log_errors(trial)
                trial_cost = self.cost(trial, trial_errors, sigma)
                if trial_cost <= cost:
                    break
                damping *= 6
            else:
                return at
            # Step 3: accept the step, lower the damping, and stop once the cost has converged.
            small = cost - trial_cost < 1e-7 * (1 + cost)
            at, errors, cost, damping = trial, trial_errors, trial_cost, damping / 4
            if small:
                break
        return at

    def _normal_equations(
        self, at: Sequence[float], errors: Sequence[float], sigma: float
    ) -> tuple[Matrix, list[float]]:
        """Return the curvature, (num_keys, num_keys), and the gradient, (num_keys,), of half the cost."""
        rows = self.jacobian(at, errors)
        weights = [_huber_weight(error / sigma) / sigma**2 for error in errors]
        size = range(len(at))
        curvature = [
            [sum(w * a * b for w, a, b in zip(weights, rows[i], rows[j], strict=True)) for j in size] for i in size
        ]
        gradient = [sum(w * a * e for w, a, e in zip(weights, rows[i], errors, strict=True)) for i in size]
        for i in size:
            curvature[i][i] += 1 / self.prior_std[i] ** 2
            gradient[i] += (at[i] - self.start[i]) / self.prior_std[i] ** 2
        return curvature, gradient

    def residual_std(self, at: Sequence[float]) -> float:
        """Return the standard deviation of the errors, from their median; requires more runs than keys."""
        errors = sorted(abs(error) for error in self.log_errors(at))
        free = len(errors) - len(at)
        middle = errors[len(errors) // 2]
        return max(MIN_RESIDUAL, 1.4826 * middle * math.sqrt(len(errors) / free))

    def parameter_std(self, at: Sequence[float], sigma: float) -> list[float]:
        """Return the standard deviation of each parameter, (num_keys,), from the inverse curvature."""
        curvature, _ = self._normal_equations(at, self.log_errors(at), sigma)
        size = len(at)
        unit = [[float(i == j) for j in range(size)] for i in range(size)]
        return [math.sqrt(max(solve_linear(curvature, unit[i])[i], 0.0)) for i in range(size)]


def _huber_loss(scaled_error: float) -> float:
    size = abs(scaled_error)
    return size * size if size <= HUBER_THRESHOLD else HUBER_THRESHOLD * (2 * size - HUBER_THRESHOLD)


def _huber_weight(scaled_error: float) -> float:
    return 1.0 if abs(scaled_error) <= HUBER_THRESHOLD else HUBER_THRESHOLD / abs(scaled_error)


def solve_linear(matrix: Matrix, right: Sequence[float]) -> list[float]:
    """Return x of matrix x = right, by Gaussian elimination with pivoting.

    `matrix` is non-singular, (n, n); `right` and the result are (n,).
    """
    size = len(right)
    rows = [[*row, right[index]] for index, row in enumerate(matrix)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda index: abs(rows[index][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for index in range(column + 1, size):
            factor = rows[index][column] / rows[column][column]
            for k in range(column, size + 1):
                rows[index][k] -= factor * rows[column][k]
    answer = [0.0] * size
    for index in reversed(range(size)):
        known = sum(rows[index][k] * answer[k] for k in range(index + 1, size))
        answer[index] = (rows[index][size] - known) / rows[index][index]
    return answer
