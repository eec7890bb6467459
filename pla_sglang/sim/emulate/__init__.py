"""A GPU's timing on a CPU: forward passes and KV transfers take as long as a profile says.

``timeline`` and ``steplog`` are plain arithmetic; ``device`` drives them with this process's clock; ``handlers`` holds
the functions that the seam table names; ``arguments`` is for the launchers.
"""
