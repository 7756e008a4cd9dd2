"""Some tests of the server need its extra; without it they are not collected."""

from importlib.util import find_spec

if any(find_spec(name) is None for name in ("starlette", "uvicorn", "prometheus_client", "pydantic")):
    collect_ignore = [
        f"test_{name}.py" for name in ("app", "body", "intake", "process", "responses", "run", "tokenization")
    ]
