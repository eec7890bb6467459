"""A fleet over time, for people: a bounded history of its instances, and the page that draws it, live or recorded.

``history`` is the data, ``recorded`` makes it from a recording, ``page`` is the one HTML file. The router keeps a
history and serves the page; ``python -m pla_sglang.view_recording`` writes it as a file.
"""
