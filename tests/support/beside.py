"""Asks two servers of one checkpoint the same bodies and says where they differ.

``python beside.py OURS THEIRS [--only WORDS] [--json FILE]``: both are addresses such as http://127.0.0.1:8000. Compared are the status, texts, token ids,
finish and stop reasons, log-probabilities, usage, and of a stream each chunk in turn.
"""

import argparse
import json
import math
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.client_bodies import BODIES, Body

TIMEOUT_S = 300
CLOSE = 1e-3
"""Two log-probabilities of float32 models count as equal within this."""
_LEFT_OUT = frozenset({"id", "created", "model", "object", "system_fingerprint", "service_tier", "owned_by"})


def asked(address: str, route: str, body: Body, model: str) -> dict[str, Any]:
    """The status and the answer: ``whole`` a JSON object, or ``chunks`` of a stream and whether ``[DONE]`` ended it."""
    named = body if "model" not in body or body["model"] != "MODEL" else {**body, "model": model}
    content = json.dumps(named).encode()
    request = urllib.request.Request(address + route, content, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            status, text, kind = answer.status, answer.read().decode(), answer.headers["Content-Type"]
    except urllib.error.HTTPError as error:
        return {"status": error.code, "sentence": error.read().decode()[:300]}
    if kind.startswith("text/event-stream"):
        events = [line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith("data:")]
        chunks = [json.loads(each) for each in events if each != "[DONE]"]
        return {"status": status, "chunks": by_choice(chunks), "done": events[-1:] == ["[DONE]"]}
    return {"status": status, "whole": json.loads(text)}


def by_choice(chunks: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Chunks of each choice in their order: which choice comes first is chance."""
    found: dict[str, list[dict[str, Any]]] = {}
    for chunk in chunks:
        choices = chunk.get("choices") or [{}]
        found.setdefault(str(choices[0].get("index", "usage")), []).append(chunk)
    return found


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """What the chunks of one choice say together: which tokens come in one chunk is a matter of time and of stops."""
    choices = [choice for chunk in chunks for choice in chunk.get("choices", [])]
    found: dict[str, Any] = {"usage": chunks[-1].get("usage"), "text": ""}
    for choice in choices:
        delta = choice.get("delta") or {}
        found["text"] += choice.get("text") or delta.get("content") or ""
        found |= {name: choice[name] for name in ("finish_reason", "stop_reason") if choice.get(name) is not None}
        for name in ("token_ids", "prompt_token_ids"):
            found[name] = found.get(name, []) + (choice.get(name) or [])
        for name, values in (choice.get("logprobs") or {}).items():
            found[name] = found.get(name, []) + values
    return found


def told(value: Any) -> Any:
    """What an answer says, without what is empty or belongs to the server."""
    if isinstance(value, Mapping):
        kept = {key: told(each) for key, each in value.items() if key not in _LEFT_OUT}
        return {key: each for key, each in kept.items() if each not in (None, [], {})}
    return [told(each) for each in value] if isinstance(value, list) else value


def differences(ours: Any, theirs: Any, place: str = "") -> list[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        names = sorted(ours.keys() | theirs.keys())
        return [each for name in names for each in differences(ours.get(name), theirs.get(name), f"{place}.{name}")]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [
            each
            for i, pair in enumerate(zip(ours, theirs, strict=True))
            for each in differences(*pair, f"{place}[{i}]")
        ]
    if isinstance(ours, int | float) and isinstance(theirs, int | float) and not isinstance(ours, bool):
        # So the rank of an unlikely token is another by a few of a hundred thousand.
        bound = {"rel_tol": CLOSE} if place.endswith(".rank") else {"abs_tol": CLOSE}
        return [] if math.isclose(ours, theirs, **bound) else [f"{place}: {ours} for {theirs}"]
    return [] if ours == theirs else [f"{place}: {_short(ours)} for {_short(theirs)}"]


def compared(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    if ours["status"] != theirs["status"]:
        sentence = ours.get("sentence") or theirs.get("sentence", "")
        return [f"status {ours['status']} for {theirs['status']}: {sentence}"]
    if ours["status"] != 200:
        return []
    found = differences(told(ours), told(theirs))
    if found and "chunks" in ours and "chunks" in theirs and ours["chunks"].keys() == theirs["chunks"].keys():
        pair = (
            {**each, "chunks": {name: joined(chunks) for name, chunks in each["chunks"].items()}}
            for each in (ours, theirs)
        )
        found = differences(*map(told, pair))
    return found


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 120 else text[:117] + "..."


def model_of(address: str) -> str:
    with urllib.request.urlopen(address + "/v1/models", timeout=TIMEOUT_S) as answer:
        return str(json.load(answer)["data"][0]["id"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ours")
    parser.add_argument("theirs")
    parser.add_argument("--only", default="", help="bodies whose name has these words")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    models = model_of(options.ours), model_of(options.theirs)
    found: dict[str, list[str]] = {}
    for name, (route, body) in BODIES.items():
        if options.only in name:
            addresses = zip((options.ours, options.theirs), models, strict=True)
            found[name] = compared(*(asked(address, route, body, model) for address, model in addresses))
    for name, problems in found.items():
        if problems:
            print(f"{name}\n" + "\n".join(f"    {each}" for each in problems[:4]))
    alike = sum(not problems for problems in found.values())
    print(f"{alike} of {len(found)} bodies get the same answer")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
