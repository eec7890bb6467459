"""Whole fleets in the simulator: which policy, which forecast, at what cost.

* ``bench.fleets.policies``: every policy on every named workload; ``combined_vs_best_single(results)``.
* ``bench.fleets.forecast``: forecasters by GPU-hours at equal attainment; ``forecast_gpu_hours(results)``.
"""
