"""Pure scheduling policy: snapshot and ``now_s`` in, decisions with reason codes out.

Nothing here reads a clock, an environment variable or a global random generator, and nothing imports torch or SGLang.
Engine, router and simulator call the same objects.
"""
