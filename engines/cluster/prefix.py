"""A prefix cache: K/V in blocks of tokens, shared by all prompts that begin alike.

The name of a block stands for its tokens and all tokens before it, so blocks of one name hold the same K/V. Blocks in use are counted.
A block that nobody uses stays until its room is needed, and the least recently used one goes first. The end of a prompt counts as used
before its beginning. So the cached blocks of a prompt are always its first ones, and a search by halves finds how many there are.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import count, islice
from typing import NamedTuple

from engines.cluster.sessions import Prefix, Session
from engines.cluster.worker import Idle, WorkerKv


class Prompt(NamedTuple):
    """The blocks that a prompt fills."""

    names: Sequence[int]
    most_found: int
    """The most blocks that a cache may spare the prompt: its last token is always computed."""


def prompt_of(prefix: Prefix, index: int, tokens: int, size: int) -> Prompt:
    """Returns the blocks of ``size`` tokens that the prompt of round ``index`` fills; with its history it has ``tokens`` tokens.
    ``size`` must divide ``prefix.block_tokens``, or the other way round."""
    names = prefix.rounds[index]
    if prefix.block_tokens >= size:
        parts = range(prefix.block_tokens // size)
        blocks = [name * len(parts) + part for name in names for part in parts]
    else:
        step = size // prefix.block_tokens
        blocks = list(names[step - 1 :: step])
    return Prompt(blocks[: tokens // size], (tokens - 1) // size)


class PrefixCache:
    """Blocks by their names. The cache has no limit of its own: the owner of the memory evicts blocks."""

    def __init__(self) -> None:
        self._users: dict[int, int] = {}
        """The number of users of each block in use."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Blocks that nobody uses, the least recently used first."""

    def __contains__(self, name: object) -> bool:
        return name in self._users or name in self._idle

    @property
    def num_used(self) -> int:
        return len(self._users)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def num_cached(self, names: Sequence[int]) -> int:
        """Returns how many blocks from the start are cached."""
        return _num_in(self, names)

    def num_in_use(self, names: Sequence[int]) -> int:
        return _num_in(self._users, names)

    def take(self, names: Sequence[int]) -> tuple[int, int]:
        """Uses these blocks of a prompt; returns how many were idle, and how many are new."""
        users, idle = self._users, self._idle
        num_idle = num_new = 0
        for name in names:
            if name in users:
                users[name] += 1
                continue
            users[name] = 1
            if name in idle:
                del idle[name]
                num_idle += 1
            else:
                num_new += 1
        return num_idle, num_new

    def give(self, names: Sequence[int]) -> int:
        """Ends one use of these blocks; returns how many nobody uses any longer."""
        users, idle, num_before = self._users, self._idle, len(self._idle)
        for name in reversed(names):
            if users[name] > 1:
                users[name] -= 1
            else:
                del users[name]
                idle[name] = None
        return len(idle) - num_before

    def evict(self, num: int) -> int:
        """Drops up to ``num`` idle blocks; returns how many."""
        num = min(num, len(self._idle))
        for _ in range(num):
            self._idle.popitem(last=False)
        return num


def _num_in(blocks: Container[int], names: Sequence[int]) -> int:
    """Returns how many names from the start are in ``blocks``, which hold no block without all those before it."""
    return bisect_left(names, True, key=lambda name: name not in blocks)


class BlockKv(WorkerKv):
    """The memory of a worker whose sessions share blocks of ``size`` tokens. Tokens beyond whole blocks, and answers until their round
    ends, belong to one session."""

    shares = True

    def __init__(
        self, capacity: int, *, size: int, prompt_of: Callable[[int], Prompt | None], keeps_answers: bool = False
    ) -> None:
        """``prompt_of`` returns the prompt of a session's current round, by the session's rank of arrival; None without names. With
        ``keeps_answers`` the whole blocks of answers stay until their room is needed, though no prompt finds them."""
        super().__init__(capacity)
        self.size, self._prompt_of, self._keeps_answers = size, prompt_of, keeps_answers
        self._unnamed = count(-1, -1)
        self.cache = PrefixCache()
        self._uses: dict[int, Sequence[int]] = {}
        """Blocks that each session uses, by its rank of arrival."""

    def cached(self, session: int) -> int:
        prompt = self._prompt_of(session)
        if prompt is None:
            return super().cached(session)
        return self.cache.num_cached(prompt.names[: prompt.most_found]) * self.size

    def protected(self, session: int, now: float) -> int:
        """How many tokens of the session's prompt others use, so that they take no further room."""
        prompt = self._prompt_of(session)
        if prompt is None:
            return super().protected(session, now)
        return self.cache.num_in_use(prompt.names[: prompt.most_found]) * self.size

    def resume(self, session: int) -> int:
        prompt = self._prompt_of(session)
        if prompt is None:
            return super().resume(session)
        names = prompt.names[: self.cache.num_cached(prompt.names[: prompt.most_found])]
        num_idle, _ = self.cache.take(names)
        self.idle -= num_idle * self.size
        self.held += num_idle * self.size
        self._uses[session] = names
        return len(names) * self.size

    def fill(self, session: int, tokens: int) -> None:
        """From now on others can find the session's whole blocks of its first ``tokens``, which it holds. A block that the cache
        already has replaces the session's own."""
        prompt, used = self._prompt_of(session), self._uses.get(session)
        if prompt is None or used is None:
            return
        names = prompt.names[: max(len(used), tokens // self.size)]
        num_idle, num_new = self.cache.take(names[len(used) :])
        self.idle -= num_idle * self.size
        self.held -= (len(names) - len(used) - num_idle - num_new) * self.size
        self._uses[session] = names

    def park(self, session: int, tokens: int, keep_until_s: float = 0.0) -> None:
        if session not in self._uses:
            super().park(session, tokens, keep_until_s)
            return
        self.fill(session, tokens)
        self.drop(session, tokens)

    def drop(self, session: int, tokens: int) -> None:
        """Free the session's own tokens. Its blocks stay for others until they are evicted."""
        names = self._uses.pop(session, ())
        if self._keeps_answers:
            blocks = tuple(islice(self._unnamed, tokens // self.size - len(names)))
            self.cache.take(blocks)
            names = (*names, *blocks)
        num_idle = self.cache.give(names)
        self.idle += num_idle * self.size
        self.held -= tokens - (len(names) - num_idle) * self.size

    def _evict(self, tokens: int, may_go: Callable[[Idle], bool]) -> int:
        freed = self.cache.evict(-(-tokens // self.size)) * self.size
        self.idle -= freed
        self.evicted += freed
        return super()._evict(tokens - freed, may_go) if freed < tokens else 0


class Reuse(NamedTuple):
    """How many blocks of prompts, and how many tokens, a cache had of all there are."""

    found: int
    num: int
    found_tokens: int
    num_tokens: int


def reuse_of(prompts: Iterable[tuple[Sequence[int], int]], block_tokens: int, capacity: int | None = None) -> Reuse:
    """Sends prompts (the names of their blocks, and their tokens) through a cache of ``capacity`` blocks one after the other. None: an
    unlimited cache. If the last block of a prompt is filled in part, only the tokens in it count."""
    cache = PrefixCache()
    num_found = num = found_tokens = num_tokens = 0
    for names, tokens in prompts:
        cached = cache.num_cached(names)
        num_found, num = num_found + cached, num + len(names)
        found_tokens, num_tokens = found_tokens + min(cached * block_tokens, tokens), num_tokens + tokens
        cache.take(names)
        cache.give(names)
        if capacity is not None:
            cache.evict(cache.num_idle - capacity)
    return Reuse(num_found, num, found_tokens, num_tokens)


def possible_reuse(sessions: Iterable[Session], size: int) -> float | None:
    """Share of the prompts' tokens that one unlimited cache would spare; None if no session has names. The cache holds a session's
    answers when its next prompt comes."""
    cached: set[int] = set()
    found_tokens = num_tokens = 0
    for session in sessions:
        if session.prefix is None:
            continue
        history = 0
        for index, (prefill, decode, _) in enumerate(session.rounds):
            names, most_found = prompt_of(session.prefix, index, history + prefill, size)
            cached.update(names[: history // size])
            found_tokens += _num_in(cached, names[:most_found]) * size
            num_tokens += history + prefill
            cached.update(names)
            history += prefill + decode
    return found_tokens / num_tokens if num_tokens else None
