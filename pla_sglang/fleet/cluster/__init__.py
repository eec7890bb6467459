"""Several engines and a router on one machine, from one command.

``spec`` says what shall run; ``zygote`` is the process that imports SGLang once and forks engines; ``children`` talks
to it; ``supervisor`` starts, watches, restarts and stops; ``logs`` is the one view of everybody's output.
"""
