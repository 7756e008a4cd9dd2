"""Endpoints that speak OpenAI's API, measured from outside."""
