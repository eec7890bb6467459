"""ARIMA one-step forecasts (DOPD Algorithm 2, line 8, and section V-D on refitting).

Parameters are fitted by statsmodels, which costs tens of milliseconds, and only when the forecast was far off. A fit
that did not help doubles the wait for the next one, since of noise nothing can be learnt. Between two fits each step
costs O(p + q), by the recursion of line 8 on the differenced series:

    x[t+1] = mu + sum_j phi_j * (x[t+1-j] - mu) + sum_k theta_k * e[t+1-k]

(statsmodels' constant is the mean mu of a stationary series, so phi applies to deviations; the paper folds both.)
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pla_sglang.common.checks import Range, check_fields, knob, require


@dataclasses.dataclass(frozen=True)
class ArimaKnobs:
    """Order and when to refit.

    Attributes:
        p, d, q: orders of the autoregression, differencing (0 or 1) and moving average.
        history: N, values that a fit looks at.
        first_fit: values before the first fit; until then the last value is the forecast.
        refit_error: mean relative error of recent forecasts that asks for a new fit.
        refit_gap: least number of values between two fits; doubled, up to ``history``, while forecasts stay far off.
    """

    p: int = knob(2, allowed=Range(0, 8))
    d: int = knob(1, allowed=Range(0, 1))
    q: int = knob(1, allowed=Range(0, 8))
    history: int = 96
    first_fit: int = 12
    refit_error: float = knob(0.15, allowed=Range(0))
    refit_gap: int = knob(6, allowed=Range(1))

    def __post_init__(self) -> None:
        check_fields(self, "arima")
        require("arima first_fit", self.first_fit, 2 * (self.p + self.q) + self.d + 2)
        require("arima history", self.history, self.first_fit)


class ArimaForecaster:
    """One series. Forecasts are never below 0: the series are lengths, rates and concurrencies."""

    name = "arima"

    def __init__(self, knobs: ArimaKnobs | None = None) -> None:
        self.knobs = knobs or ArimaKnobs()
        self.fits = 0
        self.failed_fits = 0
        self._values: deque[float] = deque(maxlen=self.knobs.history)
        self._mean, self._ar, self._ma = 0.0, np.zeros(0), np.zeros(0)
        self._residuals: deque[float] = deque(maxlen=max(1, self.knobs.q))
        self._since_fit = 0
        self._gap = self.knobs.refit_gap
        self._error = 0.0

    def add(self, value: float) -> None:
        expected = self._raw_next() if self._values else None
        if expected is not None:
            self._residuals.appendleft(value - expected)
            relative = abs(value - max(0.0, expected)) / max(abs(value), 1e-9)
            self._error += 0.3 * (min(relative, 10.0) - self._error)
        self._values.append(value)
        self._since_fit += 1
        if self._error <= self.knobs.refit_error and self._since_fit >= self._gap:
            self._gap = self.knobs.refit_gap  # the last fit has helped
        if self._fit_is_due():
            self._fit()

    def next_value(self, steps: int = 1) -> float | None:
        """Further ahead by line 8 again, on its own forecasts, whose residuals are taken as 0."""
        return max(0.0, self._raw_next(steps)) if self._values else None

    def _fit_is_due(self) -> bool:
        knobs = self.knobs
        if len(self._values) < knobs.first_fit:
            return False
        if self.fits == 0 and not self.failed_fits:
            return True
        return self._since_fit >= self._gap and self._error > knobs.refit_error

    def _fit(self) -> None:
        """O(N (p + q)^2). A constant series has no parameters to fit: the last value is exact."""
        knobs, values = self.knobs, np.array(self._values)
        if self.fits or self.failed_fits:
            self._gap = min(2 * self._gap, knobs.history)
        self.fits += 1
        self._since_fit = 0
        self._error = 0.0
        if np.ptp(values) <= 1e-9 * max(1.0, float(np.abs(values).max())):
            self._mean, self._ar, self._ma = float(values[-1]) * (1 - knobs.d), np.zeros(0), np.zeros(0)
            return
        from statsmodels.tsa.arima.model import ARIMA  # takes a second to import

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "non-invertible starting parameters": it then starts from zeros
            model = ARIMA(values, order=(knobs.p, knobs.d, knobs.q), trend="n" if knobs.d else "c")
            try:
                result = model.fit(method_kwargs={"maxiter": 50})
            except np.linalg.LinAlgError:
                self.fits -= 1
                self.failed_fits += 1
                return  # a series that the solver cannot take; the parameters stay as they were
        self._mean = 0.0 if knobs.d else float(result.params[0])
        self._ar, self._ma = np.asarray(result.arparams), np.asarray(result.maparams)
        self._residuals.extend(reversed(result.resid[-knobs.q :]) if knobs.q else ())

    def _raw_next(self, steps: int = 1) -> float:
        """Line 8; the last value before the first fit."""
        if self.fits == 0:
            return self._values[-1]
        lags = len(self._ar) + self.knobs.d
        recent = [self._values[-1 - back] for back in range(min(max(1, lags), len(self._values)))]
        shocks = list(self._residuals)
        for _ in range(steps):
            recent.insert(0, self._one_step(np.array(recent[:lags]), recent[0], shocks))
            shocks.insert(0, 0.0)
        return recent[0]

    def _one_step(self, recent: npt.NDArray[np.float64], last: float, shocks: Sequence[float]) -> float:
        """The value after ``recent``, the newest first; ``shocks``: residuals, the newest first."""
        moving = self._moving(shocks)
        if self.knobs.d:
            if len(recent) < 2:
                return last + moving
            return float(last + self._ar[: len(recent) - 1] @ -np.diff(recent) + moving)
        return float(self._mean + self._ar[: len(recent)] @ (recent - self._mean) + moving)

    def _moving(self, shocks: Sequence[float]) -> float:
        count = min(len(self._ma), len(shocks))
        return float(sum(self._ma[back] * shocks[back] for back in range(count)))
