"""What is known of how many tokens a running request has still to come."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class RemainingPredictor(abc.ABC):
    """``known`` and the answer have shape [requests]; nan means unknown."""

    @abc.abstractmethod
    def predict(self, rids: Sequence[str], known: Floats) -> Floats: ...

    def forget(self, rid: str) -> None:  # noqa: B027  # most remember nothing
        """The request has ended."""
