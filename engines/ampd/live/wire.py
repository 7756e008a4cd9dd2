"""Sends K/V between workers: frames over TCP, each a header and bytes, answered one by one.

It does not go through Redis, which would hold every byte twice and once more in its file. A history of a thousand tokens is megabytes.

The bytes on the wire are the K/V rows of a slot, [2, layers, tokens, Hkv, D] in the model's dtype.
"""

import json
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from engines.ar.torch.executor import PagedExecutor

Header: TypeAlias = Mapping[str, Any]
Buffer: TypeAlias = bytes | bytearray | memoryview
Handler: TypeAlias = Callable[[Header, bytearray], tuple[Header, Buffer]]

_SIZES = struct.Struct("!IQ")
_CONNECT_S = 2.0


def send(connection: socket.socket, header: Header, payload: Buffer = b"") -> None:
    encoded = json.dumps(header).encode()
    connection.sendall(_SIZES.pack(len(encoded), len(payload)) + encoded)
    if len(payload):
        connection.sendall(payload)


def receive(connection: socket.socket) -> tuple[dict[str, Any], bytearray]:
    """Raises ConnectionError if the other side is gone."""
    num_words, num_bytes = _SIZES.unpack(_receive_exactly(connection, _SIZES.size))
    header: dict[str, Any] = json.loads(_receive_exactly(connection, num_words))
    return header, _receive_exactly(connection, num_bytes)


def _receive_exactly(connection: socket.socket, count: int) -> bytearray:
    buffer = bytearray(count)
    view, offset = memoryview(buffer), 0
    while offset < count:
        received = connection.recv_into(view[offset:])
        if received == 0:
            raise ConnectionError("the other side has closed the connection")
        offset += received
    return buffer


class Peers:
    """Connections to other workers, one for each address, made at the first request. For use by one thread."""

    def __init__(self, *, patience_s: float) -> None:
        """``patience_s`` is how long an answer may take."""
        self._patience_s = patience_s
        self._open: dict[str, socket.socket] = {}

    def ask(self, address: str, header: Header, payload: Buffer = b"") -> tuple[dict[str, Any], bytearray]:
        """Send a frame and return the answer. Raises OSError if the worker is not there, or does not answer."""
        try:
            connection = self._open.get(address) or self._connect(address)
            send(connection, header, payload)
            return receive(connection)
        except OSError:
            if (broken := self._open.pop(address, None)) is not None:
                broken.close()
            raise

    def _connect(self, address: str) -> socket.socket:
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)), timeout=_CONNECT_S)
        connection.settimeout(self._patience_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._open[address] = connection
        return connection


class Listener:
    """Answers frames by ``handler``, which runs in a thread for each connection."""

    def __init__(self, handler: Handler, *, host: str = "127.0.0.1") -> None:
        self._handler = handler
        self._socket = socket.create_server((host, 0))
        self.address = f"{host}:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, name="kv-accept", daemon=True).start()

    def close(self) -> None:
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._answer, args=(connection,), name="kv-answer", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            while True:
                try:
                    send(connection, *self._handler(*receive(connection)))
                except OSError:
                    return


def bytes_per_token(executor: PagedExecutor) -> int:
    config = executor.model.config
    return 2 * config.n_layers * config.n_kv_heads * config.head_dim * executor.model.dtype.itemsize


def gather(executor: PagedExecutor, slot: int, start: int, end: int) -> memoryview:
    """Return the K/V of tokens [start, end) of a slot."""
    rows = _rows(executor, slot, start, end)
    pool = executor.pool
    kv = torch.stack([tensor.flatten(1, 2).index_select(1, rows) for tensor in (pool.k, pool.v)])
    return kv.cpu().view(torch.uint8).numpy().reshape(-1).data


def scatter(executor: PagedExecutor, slot: int, start: int, payload: Buffer) -> int:
    """Put K/V into the pool from token ``start`` of the slot, which has the blocks for it. Return how many tokens it was."""
    tokens = len(payload) // bytes_per_token(executor)
    if tokens == 0:
        return 0
    config, pool = executor.model.config, executor.pool
    shape = (2, config.n_layers, tokens, config.n_kv_heads, config.head_dim)
    kv = torch.frombuffer(payload, dtype=executor.model.dtype).view(shape).to(pool.k.device)
    rows = _rows(executor, slot, start, start + tokens)
    for tensor, received in zip((pool.k, pool.v), kv, strict=True):
        tensor.flatten(1, 2).index_copy_(1, rows, received)
    return tokens


def _rows(executor: PagedExecutor, slot: int, start: int, end: int) -> torch.Tensor:
    position = np.arange(start, end)
    rows = executor.tables.rows(np.full(end - start, slot), position)
    return torch.from_numpy(rows).to(executor.pool.k.device)
