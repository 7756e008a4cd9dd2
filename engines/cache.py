"""The user's cache of files that this machine made once, reused while the inputs they were made from are unchanged."""

import hashlib
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

MOST_KEPT = 400
"""Most files that we keep of one kind; we delete the oldest."""


def cache_folder() -> Path:
    """The cache's folder, below ``XDG_CACHE_HOME`` or else below ``~/.cache``; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "dllm-serve-repro")


def digest_of(contents: Iterable[bytes]) -> str:
    """Return 32 hexadecimal digits that depend on the contents, their lengths and their order."""
    digest = hashlib.sha256()
    for content in contents:
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()[:32]


def cached_result(kind: str, inputs: Iterable[bytes], compute: Callable[[], bytes]) -> bytes:
    """Return what ``compute`` returned for these inputs before on this machine, or else call it and cache its result, if the cache
    can be written. ``inputs`` must hold everything that the result depends on."""
    path = cache_folder() / kind / digest_of(inputs)
    with suppress(OSError):
        digest, cached = (content := path.read_bytes())[:32], content[32:]
        if digest == digest_of([cached]).encode():  # otherwise the file is damaged
            return cached
    result = compute()
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(digest_of([result]).encode() + result)
        temporary.replace(path)
        for old in sorted(path.parent.iterdir(), key=os.path.getmtime)[:-MOST_KEPT]:
            old.unlink()
    return result
