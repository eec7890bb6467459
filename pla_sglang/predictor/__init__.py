"""STAR's learned predictor of how many tokens a running request has still to come (HPDC '26, section 4).

An engine loads ``model``. The rest works offline: ``python -m pla_sglang.predictor collect | train | evaluate``.
"""
