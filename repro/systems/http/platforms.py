"""Where an endpoint runs is its own business: the platform of its cells names nothing."""

from __future__ import annotations

from repro.systems.platforms import Platform

ENDPOINT = Platform(name="endpoint", title="an OpenAI-compatible endpoint", executor="http", gpu=None)
