"""Static KV allocation: one contiguous run of rows per request, for its whole life (dLLM-Serve §4.5)."""

from __future__ import annotations

from bisect import bisect_left


class KvPool:
    """First-fit allocator over ``num_rows`` rows; a row holds K and V of one token over all layers.

    Exact-fit runs leave no internal fragmentation; neighbouring free runs are merged on release, so
    an empty pool is always one run and any request that fits the pool can eventually be admitted.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.used_rows = 0
        self._starts: list[int] = [0] if num_rows else []
        self._lengths: list[int] = [num_rows] if num_rows else []

    def allocate(self, rows: int) -> int | None:
        """Start of a free run of ``rows`` rows, or None if there is none now. Zero rows start at 0."""
        if rows == 0:
            return 0
        for i, length in enumerate(self._lengths):
            if length >= rows:
                start = self._starts[i]
                if length == rows:
                    del self._starts[i], self._lengths[i]
                else:
                    self._starts[i] += rows
                    self._lengths[i] -= rows
                self.used_rows += rows
                return start
        return None

    def release(self, start: int, rows: int) -> None:
        if rows == 0:
            return
        i = bisect_left(self._starts, start)
        before_end = self._starts[i - 1] + self._lengths[i - 1] if i else 0
        after_start = self._starts[i] if i < len(self._starts) else self.num_rows
        assert before_end <= start, "released rows were not allocated"
        assert start + rows <= after_start, "released rows were not allocated"
        self._starts.insert(i, start)
        self._lengths.insert(i, rows)
        self.used_rows -= rows
        if i + 1 < len(self._starts) and start + rows == after_start:
            self._lengths[i] += self._lengths[i + 1]
            del self._starts[i + 1], self._lengths[i + 1]
        if i and before_end == start:
            self._lengths[i - 1] += self._lengths[i]
            del self._starts[i], self._lengths[i]
