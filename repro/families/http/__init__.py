"""Endpoints with an OpenAI-compatible API, measured from outside."""
