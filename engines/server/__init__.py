"""Engines behind an OpenAI-compatible HTTP server."""
