"""The user's cache: what this machine made once from inputs that have not changed since."""

import hashlib
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

MOST_KEPT = 400
"""Files of one kind; the oldest go."""


def cache_folder() -> Path:
    """Below ``XDG_CACHE_HOME``, else below ``~/.cache``; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "dllm-serve-repro")


def digest_of(contents: Iterable[bytes]) -> str:
    """32 hexadecimal digits over the contents, their lengths and their order."""
    found = hashlib.sha256()
    for content in contents:
        found.update(len(content).to_bytes(8, "little") + content)
    return found.hexdigest()[:32]


def kept_or_made(kind: str, inputs: Iterable[bytes], make: Callable[[], bytes]) -> bytes:
    """What ``make`` returned for these inputs before, on this machine; else what it returns, which is kept where the cache can
    be written. ``inputs`` are all that it follows from."""
    path = cache_folder() / kind / digest_of(inputs)
    with suppress(OSError):
        digest, kept = (content := path.read_bytes())[:32], content[32:]
        if digest == digest_of([kept]).encode():  # else a disk has lost some of it
            return kept
    made = make()
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_bytes(digest_of([made]).encode() + made)
        beside.replace(path)
        for old in sorted(path.parent.iterdir(), key=os.path.getmtime)[:-MOST_KEPT]:
            old.unlink()
    return made
