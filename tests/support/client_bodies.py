"""The bodies of ``client_bodies.yaml``: by kind and name the route of each, and what is sent."""

from pathlib import Path
from typing import Any

import yaml

Body = dict[str, Any]
_USUAL: dict[str, tuple[str, Body]] = {
    "completion": ("/v1/completions", {"prompt": "The sky over the hill was"}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello there"}]}),
}


def _of(said: dict[str, Any]) -> tuple[str, Body]:
    left_out = said.pop("without", None)
    ((kind, fields),) = said.items()
    route, usual = _USUAL[kind]
    body = {"model": "MODEL", **usual, "max_tokens": 8, "temperature": 0, **fields}
    body.pop(left_out, None)
    if isinstance(prompt := body.get("prompt"), dict):
        body["prompt"] = prompt["begin"] + prompt["repeat"] * prompt["times"]
    return route, body


_KINDS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
BODIES = {f"{kind}: {name}": _of(said) for kind, bodies in _KINDS.items() for name, said in bodies.items()}
