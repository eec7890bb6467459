"""What starts and stops instances of a fleet: one interface, and what stands behind it.

``interface`` is what a planner knows; ``local`` orders from the cluster of ``launch_cluster``; ``lease`` lets one
planner alone scale a fleet; ``cluster_socket`` is what ``local`` and the cluster speak, and the cluster imports it too.
"""

from __future__ import annotations

from pathlib import Path

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.actuators.interface import Actuator
from pla_sglang.fleet.actuators.local import LocalActuator

ALLOWED = "local:STATE_FILE, the --state-file of a cluster on this machine"


def open_actuator(text: str) -> Actuator:
    """The actuator that ``text`` names, as in ``local:/run/cluster.json``. Its cluster need not run yet.

    Raises ConfigError.
    """
    scheme, _, rest = text.partition(":")
    if scheme != "local" or not rest:
        raise ConfigError(f"--actuator {text!r} is not known; allowed: {ALLOWED}")
    return LocalActuator(Path(rest))
