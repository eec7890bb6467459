"""Whole fleets in the simulator: which policy, which forecast, at what cost; see docs/fleets.md."""
