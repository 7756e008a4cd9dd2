"""Tests of the server need its extra; without it none of them is collected."""

from importlib.util import find_spec

if any(find_spec(name) is None for name in ("starlette", "uvicorn", "prometheus_client", "pydantic")):
    collect_ignore_glob = ["test_*.py"]
