"""How a process gives up its rights before it runs code that nobody has read.

The server runs in a bare interpreter (``python -S`` with an empty environment), so only the standard library is
imported here; ``client`` is the harness's side.
"""
