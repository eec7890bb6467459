"""ARIMA one-step forecasts (DOPD Algorithm 2, line 8, and section V-D on refitting).

Parameters are fitted by statsmodels, which costs tens of milliseconds, and only when the forecast was far off. A fit
that did not help doubles the wait for the next one, since of noise nothing can be learnt. Between two fits each step
costs O(p + q), by the recursion of line 8 on the differenced series:

    x[t+1] = x[t] + sum_j phi_j * (x[t+1-j] - x[t-j]) + sum_k theta_k * e[t+1-k]
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

AR, MA = 2, 1  # orders of the autoregression and of the moving average; the series is differenced once
HISTORY = 96  # N, values that a fit looks at
FIRST_FIT = 12  # values before the first fit; until then the last value is the forecast
REFIT_ERROR = 0.15  # mean relative error of recent forecasts that asks for a new fit
REFIT_GAP = 6  # least number of values between two fits; doubled, up to ``HISTORY``, while forecasts stay far off


class ArimaForecaster:
    """One series. Forecasts are never below 0: the series are lengths, rates and concurrencies."""

    name = "arima"

    def __init__(self) -> None:
        self.fits = 0
        self.failed_fits = 0
        self._values: deque[float] = deque(maxlen=HISTORY)
        self._ar, self._ma = np.zeros(0), np.zeros(0)
        self._residuals: deque[float] = deque(maxlen=MA)
        self._since_fit = 0
        self._gap = REFIT_GAP
        self._error = 0.0

    def add(self, value: float) -> None:
        expected = self._raw_next() if self._values else None
        if expected is not None:
            self._residuals.appendleft(value - expected)
            relative = abs(value - max(0.0, expected)) / max(abs(value), 1e-9)
            self._error += 0.3 * (min(relative, 10.0) - self._error)
        self._values.append(value)
        self._since_fit += 1
        if self._error <= REFIT_ERROR and self._since_fit >= self._gap:
            self._gap = REFIT_GAP  # the last fit has helped
        if self._fit_is_due():
            self._fit()

    def next_value(self, steps: int = 1) -> float | None:
        """Further ahead by line 8 again, on its own forecasts, whose residuals are taken as 0."""
        return max(0.0, self._raw_next(steps)) if self._values else None

    def _fit_is_due(self) -> bool:
        if len(self._values) < FIRST_FIT:
            return False
        if self.fits == 0 and not self.failed_fits:
            return True
        return self._since_fit >= self._gap and self._error > REFIT_ERROR

    def _fit(self) -> None:
        """O(N (p + q)^2). A constant series has no parameters to fit: the last value is exact."""
        values = np.array(self._values)
        if self.fits or self.failed_fits:
            self._gap = min(2 * self._gap, HISTORY)
        self.fits += 1
        self._since_fit = 0
        self._error = 0.0
        if np.ptp(values) <= 1e-9 * max(1.0, float(np.abs(values).max())):
            self._ar, self._ma = np.zeros(0), np.zeros(0)
            return
        from statsmodels.tsa.arima.model import ARIMA  # takes a second to import

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "non-invertible starting parameters": it then starts from zeros
            model = ARIMA(values, order=(AR, 1, MA), trend="n")
            try:
                result = model.fit(method_kwargs={"maxiter": 50})
            except np.linalg.LinAlgError:
                self.fits -= 1
                self.failed_fits += 1
                return  # a series that the solver cannot take; the parameters stay as they were
        self._ar, self._ma = np.asarray(result.arparams), np.asarray(result.maparams)
        self._residuals.extend(reversed(result.resid[-MA:]))

    def _raw_next(self, steps: int = 1) -> float:
        """Line 8; the last value before the first fit."""
        if self.fits == 0:
            return self._values[-1]
        lags = len(self._ar) + 1
        recent = [self._values[-1 - back] for back in range(min(lags, len(self._values)))]
        shocks = list(self._residuals)
        for _ in range(steps):
            recent.insert(0, self._one_step(np.array(recent[:lags]), recent[0], shocks))
            shocks.insert(0, 0.0)
        return recent[0]

    def _one_step(self, recent: npt.NDArray[np.float64], last: float, shocks: Sequence[float]) -> float:
        """The value after ``recent``, the newest first; ``shocks``: residuals, the newest first."""
        moving = self._moving(shocks)
        if len(recent) < 2:
            return last + moving
        return float(last + self._ar[: len(recent) - 1] @ -np.diff(recent) + moving)

    def _moving(self, shocks: Sequence[float]) -> float:
        count = min(len(self._ma), len(shocks))
        return float(sum(self._ma[back] * shocks[back] for back in range(count)))
