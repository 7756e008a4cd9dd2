"""Events of the engine on their way to an answer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engines.server.completion import Heard, merged
from engines.server.protocol import Admitted, Event, Failed, Finished, Tokens

IDS = st.lists(st.integers(0, 9), max_size=3).map(tuple)
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(Tokens, st.just(0), IDS),
    st.builds(Finished, st.just(0), IDS),
    st.just(Admitted(0)),
    st.just(Failed(0, "lost")),
)


def tokens_of(news: list[Heard], choice: int) -> list[int]:
    return [
        token
        for of, event in news
        if of == choice and isinstance(event, Tokens | Finished)
        for token in event.token_ids
    ]


def test_tokens_that_came_together_are_said_together() -> None:
    news: list[Heard] = [
        (0, Admitted(7)),
        (0, Tokens(7, (1,))),
        (1, Tokens(8, (2,))),
        (0, Tokens(7, (3,))),
        (1, Failed(8, "lost")),
        (0, Finished(7, (4,))),
    ]
    assert merged(news) == [(0, Admitted(7)), (0, Finished(7, (1, 3, 4))), (1, Tokens(8, (2,))), (1, Failed(8, "lost"))]


@given(st.lists(st.tuples(st.integers(0, 2), EVENTS)))
def test_no_token_is_lost_or_comes_behind_another_kind_of_event(news: list[Heard]) -> None:
    found = merged(news)
    assert len(found) <= len(news)
    for choice in range(3):
        assert tokens_of(found, choice) == tokens_of(news, choice)
        kinds = [
            [type(event) for of, event in each if of == choice and not isinstance(event, Tokens)]
            for each in (news, found)
        ]
        assert kinds[0] == kinds[1]
        # Up to the first end or failure, as many tokens as before.
        for place, (of, event) in enumerate(found):
            if of == choice and isinstance(event, Failed):
                before = next(k for k, (other, same) in enumerate(news) if other == choice and isinstance(same, Failed))
                assert tokens_of(found[:place], choice) == tokens_of(news[:before], choice)
                break
