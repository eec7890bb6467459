"""What starts and stops instances of a fleet: one interface, and what stands behind it.

``interface`` is what a planner knows; ``local`` orders from the cluster of ``launch_cluster``, ``ray_actuator`` from
its fleet in Ray, ``kubernetes_*`` from Kubernetes; ``lease`` lets one planner alone scale a fleet; ``cluster_socket``
is what ``local`` and the cluster speak, and the cluster imports it too. The packages of Ray and of Kubernetes are
imported only where they are named.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

from pla_sglang.common.errors import ConfigError
from pla_sglang.fleet.actuators.interface import Actuator
from pla_sglang.fleet.actuators.local import LocalActuator

ALLOWED = (
    "local:STATE_FILE, the --state-file of a cluster on this machine; ray:ADDRESS/NAME, a fleet in Ray; "
    "kubernetes:NAMESPACE/FLEET, Deployments"
)


def open_actuator(text: str) -> Actuator:
    """The actuator that ``text`` names, as in ``local:/run/cluster.json``. Its cluster need not run yet.

    Raises ConfigError.
    """
    scheme, _, rest = text.partition(":")
    if scheme not in _SCHEMES or not rest:
        raise ConfigError(f"--actuator {text!r} is not known; allowed: {ALLOWED}")
    return _SCHEMES[scheme](rest)


def _open_ray(rest: str) -> Actuator:
    from pla_sglang.fleet.actuators.ray_actuator import RayActuator
    from pla_sglang.fleet.actuators.ray_names import RayFleetName

    address, _, name = rest.rpartition("/")
    return RayActuator(RayFleetName(address or name, name if address else ""))


def _open_kubernetes(place: str) -> Actuator:
    from pla_sglang.fleet.actuators.kubernetes_actuator import KubernetesActuator
    from pla_sglang.fleet.actuators.kubernetes_client import parse_place

    namespace, fleet = parse_place("--actuator kubernetes:", place)
    identity = f"{socket.gethostname()}_{os.getpid()}_{secrets.token_hex(4)}"  # another one for each process
    return KubernetesActuator(namespace, fleet, identity)


_SCHEMES: dict[str, Callable[[str], Actuator]] = {
    "local": lambda rest: LocalActuator(Path(rest)),
    "ray": _open_ray,
    "kubernetes": _open_kubernetes,
}
