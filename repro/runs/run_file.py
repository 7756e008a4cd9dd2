"""The file of a run: lines of JSON, gzipped. Each line holds one part by its name, the last one seals those before.

All lines but the provenance and the seal are the same for the same simulated cell and code. Any tool that reads gzip reads it:
``zcat RUN.jsonl.gz``.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any

from repro.runs.seal import SEAL

SUFFIX = ".jsonl.gz"
CELL, MANIFEST, SUMMARY, PROVENANCE = "cell", "manifest", "summary", "provenance"

_HEADER = bytes.fromhex("1f8b08000000000000ff")
_LAST_STORED = b"\x01"


class Damaged(ValueError):
    """A byte is not as it was written."""


def encoded(parts: Mapping[str, Any]) -> bytes:
    """Raises ValueError for what JSON cannot hold."""
    content = gzip.compress(b"".join(json_line(name, value) for name, value in parts.items()), mtime=0)
    return content + _seal(content)


def parts_of(content: bytes) -> dict[str, bytes]:
    """The line of each part. Raises Damaged unless every byte is as it was written."""
    end = max(0, len(content) - _SEAL_SIZE)
    if content[end:] != _seal(content[:end]):
        raise Damaged("it is not as it was written")
    lines = gzip.decompress(content[:end]).split(b"\n")[:-1]
    return {line.split(b'"', 2)[1].decode(): line for line in lines}


def part_of(parts: Mapping[str, bytes], name: str) -> Any:
    return json.loads(parts[name])[name]


def json_line(name: str, value: Any) -> bytes:
    text = json.dumps({name: value}, separators=(",", ":"), sort_keys=True, ensure_ascii=False, allow_nan=False)
    return f"{text}\n".encode()


def _seal(content: bytes) -> bytes:
    """A digest of the compressed lines, as another line in a gzip member of its own. It is not compressed: its bytes are the same
    whatever compresses."""
    line = json_line(SEAL, hashlib.sha256(content).hexdigest())
    size = struct.pack("<HH", len(line), len(line) ^ 0xFFFF)
    return _HEADER + _LAST_STORED + size + line + struct.pack("<II", zlib.crc32(line), len(line))


_SEAL_SIZE = len(_seal(b""))
