"""Removes secrets and home folders from all that is written and printed: runs, exports, JSON, logs and messages."""

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from repro.paths import REPO

REDACTED = "***"

_LAST_WORD = re.compile(
    "keys?|token|secrets?|passwords?|passwd|pwd|pass|passphrase|credentials?|creds|auth|authorization|bearer|cookie|signature|sig|jwt|pat"
)
_INSIDE = re.compile(
    "(api|access|private|account)key|secret|password|passwd|passphrase|authorization|credential|(auth|access|bearer|session|refresh|id|api)token"
)
_HARMLESS = re.compile(
    "(cache|sort|group|partition|routing|public|hash|prefix|seed)keys?"
    "|(eos|bos|pad|mask|unk|stop|end|start|sep|cls|image|special|first|last|next|max|min|per)token"
)
"""A name whose last two words match this holds no secret."""
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_HINT = re.compile(
    r"key|token|secret|pass|pwd|cred|auth|bearer|basic|cookie|sig|jwt|pat|sk-|hf_|gh[a-z]_|://", re.IGNORECASE
)
"""Matches every text that may hold a secret; other texts are left as they are, unread."""

_VALUE = re.compile(
    r"""\bbearer\s+(?!tokens?\b)[^\s,;"'}\]\\]+|\bbasic\s+(?=\S*[\d+/=])[^\s,;"'}\]\\]{6,}"""
    r"""|\b(hf|sk|ghp|gho|ghs|glpat|xox[a-z]|github_pat|nvapi)[-_][A-Za-z0-9_-]{6,}""",
    re.IGNORECASE,
)
_URL_USER = re.compile(r"(?<=://)[^/\s@?#'\"]+@")
_QUOTED_PAIR = re.compile(
    r"""(?P<q>\\*["'])(?P<name>[A-Za-z][\w.-]*)(?P=q)(?P<mid>\s*[:=]\s*)(?P<v>\\*["'])(?P<value>.*?)(?P=v)(?=\s*[,}\])]|\s*$)"""
    r"""|(?P<q2>\\*["'])(?P<name2>[A-Za-z][\w.-]*)(?P=q2)(?P<mid2>\s*[:=]\s*)\\*["']?(?P<value2>[^\s,{}\[\]"'\\]+)"""
)
_PAIR = re.compile(r"""(?<![\w"'.-])(?P<name>[A-Za-z][\w-]*)(?P<mid>=|\s*:\s+)["']?""")
_PAIRED = re.compile(r"""(?:(?:bearer|basic)\s+)?[^\s&;,"'{}\[\]]+""", re.IGNORECASE)
_ABSOLUTE_PATH = re.compile(r"(?<![\w./~])/(?!/)[^\s:,;\"']+")


@lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Whether a value of this name, in any spelling (``api_key``, ``apiKey``, ``X-Api-Key``), is secret and must not be written."""
    words = [word.lower() for word in _WORDS.findall(name)]
    if _HARMLESS.fullmatch("".join(words[-2:])):
        return False
    return _INSIDE.search("".join(words)) is not None or _LAST_WORD.fullmatch("".join(words[-1:])) is not None


def without_secrets(text: str) -> str:
    """Return the text without secrets: values of JSON and ``NAME=VALUE`` with a secret's name, user parts of URLs, and anything that looks
    like a key. A text without any is returned unchanged."""
    if _HINT.search(text) is None:
        return text
    text = _URL_USER.sub(f"{REDACTED}@", text)
    if "{" in text or "[" in text:
        text = _without_json_secrets(text)
    text = _QUOTED_PAIR.sub(_quoted_pair, text)
    text = _without_pairs(text)
    return _VALUE.sub(REDACTED, text)


def clean_value(value: Any) -> Any:
    """Return a JSON value without secrets at any depth. It also hides the values of secret environment variables, and writes ``~`` for the
    home folder."""
    secrets = sorted(
        (secret for name, secret in os.environ.items() if is_secret(name) and len(secret) >= 8), key=len, reverse=True
    )
    return _clean_value(value, _home(), secrets)


def _clean_value(value: Any, home: str | None, secrets: Sequence[str]) -> Any:
    """Replaces ``home`` by ``~``, and each of ``secrets`` by a few stars."""
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, REDACTED)
        return without_home(without_secrets(value), home)
    if isinstance(value, Mapping):
        return {
            name: REDACTED if _is_kept_secret(name, item) else _clean_value(item, home, secrets)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [item if type(item) in (int, float) else _clean_value(item, home, secrets) for item in value]
    return value


def without_home(text: str, home: str | None) -> str:
    """Replaces the home folder by ``~`` anywhere in the text."""
    if home is None or home not in text:
        return text
    return re.sub(rf"(?<!\w){re.escape(home)}(?![\w.-])", "~", text)


def with_home(text: str) -> str:
    """Expands ``~/...`` to the full path."""
    home = _home() if text.startswith("~/") else None
    return text if home is None else f"{home}{text[1:]}"


def _home() -> str | None:
    try:
        home = Path.home()
    except RuntimeError:  # there is no such user
        return None
    return None if not home.is_absolute() or home == Path("/") else str(home)  # the root of everything hides nothing


def _is_kept_secret(name: object, value: object) -> bool:
    return isinstance(name, str) and is_secret(name) and value not in (None, True, False, "", [], {})


def _without_json_secrets(text: str) -> str:
    """Removes the secrets of any JSON in the text. JSON without secrets stays as it is written."""
    parts, pos, decoder = [], 0, json.JSONDecoder()
    while (
        begin := min((index for index in (text.find("{", pos), text.find("[", pos)) if index >= 0), default=-1)
    ) >= 0:
        try:
            value, end = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError):
            parts.append(text[pos : begin + 1])
            pos = begin + 1
            continue
        clean = _clean_value(value, None, ())
        parts += [text[pos:begin], text[begin:end] if clean == value else json.dumps(clean, ensure_ascii=False)]
        pos = end
    return "".join(parts) + text[pos:]


def _quoted_pair(match: re.Match[str]) -> str:
    name = match["name"] or match["name2"]
    if not is_secret(name) or (match["value"] or match["value2"]) in ("", "null", "None", "true", "false"):
        return match[0]
    if match["name"]:
        return f"{match['q']}{name}{match['q']}{match['mid']}{match['v']}{REDACTED}{match['v']}"
    return f"{match['q2']}{name}{match['q2']}{match['mid2']}{REDACTED}"


def _without_pairs(text: str) -> str:
    """Hides values of secret names. In prose a colon opens an explanation, so there the value needs a digit and a name like ``api_key``."""
    parts, pos = [], 0
    for match in _PAIR.finditer(text):
        value = _PAIRED.match(text, match.end())
        if match.start() < pos or value is None or not is_secret(match["name"]):
            continue
        if "=" not in match["mid"] and not (_is_certain(match["name"]) and re.search(r"\d", value[0])):
            continue
        parts += [text[pos : match.end()], REDACTED]
        pos = value.end()
    return "".join(parts) + text[pos:]


def _is_certain(name: str) -> bool:
    return "-" in name or _INSIDE.search(name.replace("_", "").lower()) is not None


def clean_command(argv: Sequence[str]) -> list[str]:
    """The command line without secrets, user names and machine paths. The program is its bare name."""
    if not argv:
        return []
    cleaned = [os.path.basename(argv[0])]
    hide_next = False
    for argument in argv[1:]:
        name, equals, _ = argument.partition("=")
        is_named = " " not in name and is_secret(name)
        if hide_next and not argument.startswith("--"):
            cleaned.append(REDACTED)
            hide_next = False
        elif is_named and equals:
            cleaned.append(f"{name}={REDACTED}")
            hide_next = False
        else:
            cleaned.append(clean_text(argument))
            hide_next = is_named and name.startswith("-")
    return cleaned


def clean_text(text: str) -> str:
    """Removes secrets. Paths become relative to the repository, ``~/...`` under the home folder, or else ``.../name``."""
    home = _home()
    text = _ABSOLUTE_PATH.sub(lambda match: _clean_path(match.group(), home), without_secrets(text))
    # A relative path may still hold the home folder: ../../home/name/x.
    return without_home(text, home)


def _clean_path(text: str, home: str | None) -> str:
    path = Path(os.path.normpath(text))
    if path.is_relative_to(REPO):
        return str(path.relative_to(REPO))
    if home is not None and path.is_relative_to(home):
        return str("~" / path.relative_to(home))
    return f".../{path.name}"


class CleanFormatter(logging.Formatter):
    """Formats log lines without secrets."""

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))
