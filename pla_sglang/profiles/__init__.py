"""Step times of a GPU as small JSON files: the duration of a forward pass, by its batch.

The emulated device, the simulator and the predictors of the routers all read the same profiles.
"""

from pla_sglang.profiles.load import load_profile, parse_profile, profile_names, write_profile
from pla_sglang.profiles.step import FitError, LaunchFloor, ProfileError, StepProfile

__all__ = [
    "FitError",
    "LaunchFloor",
    "ProfileError",
    "StepProfile",
    "load_profile",
    "parse_profile",
    "profile_names",
    "write_profile",
]
