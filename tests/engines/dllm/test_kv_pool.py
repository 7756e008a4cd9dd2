"""The row allocator against a set of rows."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from support.engine_runs import free_runs

from engines.dllm.scheduling import KvPool

Run = tuple[int, int]


class PoolMachine(RuleBasedStateMachine):
    """``rows`` is the truth: every row that is handed out, by its holder."""

    held = Bundle("held")

    @initialize(num_rows=st.integers(0, 40))
    def make(self, num_rows: int) -> None:
        self.pool = KvPool(num_rows)
        self.owner: dict[int, Run] = {}

    def free_runs(self) -> list[Run]:
        runs, start = [], None
        for row in range(self.pool.num_rows + 1):
            is_free = row < self.pool.num_rows and row not in self.owner
            if is_free and start is None:
                start = row
            elif not is_free and start is not None:
                runs.append((start, row - start))
                start = None
        return runs

    @rule(target=held, rows=st.integers(0, 15))
    def allocate(self, rows: int):
        fitting = [start for start, length in self.free_runs() if length >= rows]
        start = self.pool.allocate(rows)
        if rows == 0:
            assert start == 0
            return multiple()
        assert start == (fitting[0] if fitting else None), "first fit: the lowest run that is long enough"
        if start is None:
            return multiple()
        taken = range(start, start + rows)
        assert not self.owner.keys() & set(taken), "rows were handed out twice"
        self.owner.update(dict.fromkeys(taken, (start, rows)))
        return (start, rows)

    @rule(run=consumes(held))
    def release(self, run: Run) -> None:
        self.pool.release(*run)
        for row in range(run[0], run[0] + run[1]):
            del self.owner[row]

    @rule(start=st.integers(0, 40), rows=st.integers(1, 15))
    def release_rows_that_are_free(self, start: int, rows: int) -> None:
        asked = set(range(start, start + rows))
        if asked <= self.owner.keys():
            return
        before = free_runs(self.pool), self.pool.used_rows
        with pytest.raises(AssertionError, match="not allocated"):
            self.pool.release(start, rows)
        assert (free_runs(self.pool), self.pool.used_rows) == before

    @rule()
    def release_nothing(self) -> None:
        self.pool.release(0, 0)

    @invariant()
    def every_row_is_held_or_free(self) -> None:
        assert self.pool.used_rows == len(self.owner)
        assert list(free_runs(self.pool)) == self.free_runs(), "free runs are maximal and in order"


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40)


def test_an_empty_pool_is_one_run():
    pool = KvPool(30)
    starts = [pool.allocate(6) for _ in range(5)]
    assert starts == [0, 6, 12, 18, 24]
    assert pool.allocate(1) is None
    for start in (6, 18, 0, 24, 12):
        pool.release(start, 6)
    assert free_runs(pool) == ((0, 30),)
    assert pool.allocate(30) == 0
