"""Tests that run what a model wrote need bubblewrap."""

import struct

import pytest

from repro.tasks.sandbox.client import ALLOW, RETURN, jail_refusal

needs_jail = pytest.mark.skipif(jail_refusal() is not None, reason=f"no program is confined here: {jail_refusal()}")
ALLOW_EVERYTHING = struct.pack("=HBBI", RETURN, 0, 0, ALLOW)
"""A seccomp filter that is none."""
