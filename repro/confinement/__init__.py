"""How a process gives up its rights before it runs code that nobody has read.

Runs in a bare interpreter (``python -S`` with an empty environment), so only the standard library is
imported here; ``repro.tasks.sandbox`` is the side of the harness.
"""
