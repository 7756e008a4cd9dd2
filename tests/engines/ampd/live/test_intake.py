"""Requests as rounds of sessions, before workers that are the test's own hands."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

import pytest
from support.dynamo_stand_in import Context
from support.live import HandFleet, needs_redis

from engines.ampd.live.coordinator import Coordinator
from engines.ampd.live.intake import FIRST_NAMED, Deciding, Limits, LiveRequest, RouterSpec, SessionIntake
from engines.ampd.live.store import RedisServer, Store
from engines.errors import UserError
from engines.policies.routing import LeastKvMemory, RemoteOnly

LIMITS = Limits(vocab_size=1000, max_len=64)
FIRST, SECOND = [1, 2, 3], [7, 4, 5]
"""Prompts, and what hands answer: 7, then each token's place."""


def request(ids: list[int], max_tokens: int = 3, **changes: Any) -> dict[str, Any]:
    """As Dynamo hands it over; ``session`` and ``final`` are what its headers say."""
    agent = {"session_id": changes.pop("session"), "input_trigger": "other"} if "session" in changes else None
    if agent is not None and changes.pop("final", False):
        agent["session_final"] = True
    stop = {"max_tokens": max_tokens, "ignore_eos": True, "stop": None, "stop_token_ids": None}
    told = {"token_ids": ids, "stop_conditions": stop, "sampling_options": {"temperature": 0.0, "n": None}}
    for name, value in changes.items():
        told[name] = {**told.get(name, {}), **value}
    return {**told, "agent_context": agent}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as found:
        yield found


@pytest.fixture
def store(server: RedisServer, request: pytest.FixtureRequest) -> Iterator[Store]:
    prefix = f"{{{request.node.name}}}"
    with HandFleet(server.url, prefix, longest=40):
        yield Store.connect(server.url, prefix)


def intake_of(store: Store) -> SessionIntake:
    router = RemoteOnly("round-robin")
    return SessionIntake(
        Coordinator(store, binder=LeastKvMemory(), router=router, estimator=None, lease_s=600.0), LIMITS
    )


def served(intake: SessionIntake, work: Callable[[], Any], *, is_kept: bool = True) -> Any:
    async def run() -> Any:
        keeping = asyncio.ensure_future(intake.keep()) if is_kept else None
        try:
            return await work()
        finally:
            if keeping is not None:
                keeping.cancel()
                with suppress(asyncio.CancelledError):
                    await keeping

    return asyncio.run(run())


async def answer(intake: SessionIntake, asked: dict[str, Any], *, leaves_after: int | None = None) -> list[int]:
    """``leaves_after`` so many tokens."""
    ids: list[int] = []
    reasons: list[str | None] = []
    context = Context()
    if leaves_after == 0:
        context.stop()
    async with aclosing(intake.generate(asked, context)) as said:
        async for each in said:
            ids += each["token_ids"]
            reasons.append(each["finish_reason"])
            if len(ids) == leaves_after:
                context.stop()
    if len(ids) == asked["stop_conditions"]["max_tokens"]:
        assert reasons == [None] * (len(ids) - 1) + ["length"]
    return ids


@needs_redis
@pytest.mark.parametrize("is_kept", [True, False], ids=["told of tokens", "no word of tokens gets through"])
def test_turns_of_a_session_are_its_rounds(store, is_kept):
    intake = intake_of(store)

    async def turns() -> list[list[int]]:
        first = await answer(intake, request(FIRST, session="5"))
        return [first, await answer(intake, request([*FIRST, *first, *SECOND], 1, session="5", final=True))]

    assert served(intake, turns, is_kept=is_kept) == [[7, 4, 5], [7]]
    session = store.fields("session", 5)
    assert (session["state"], session["round"]) == ("done", "1")
    tasks = [store.fields("task", number) for number in (0, 1)]
    assert [(each["kind"], each["history"], each["tokens"]) for each in tasks] == [
        ("initial", "0", "3"),
        ("incremental", "6", "3"),
    ]
    assert [line for line in store.log() if '"kind":"bind"' in line or '"kind":"route"' in line] != []


@needs_redis
def test_sessions_at_once_and_those_without_a_number(store):
    intake = intake_of(store)

    async def together() -> list[list[int]]:
        asked = [request(FIRST, session=name) for name in ("0", "a-b", "c", "1e9")] + [request(FIRST)]
        found = await asyncio.gather(*(answer(intake, each) for each in asked))
        await answer(intake, request([*FIRST, *found[1], 9], session="a-b", final=True))
        return found

    assert served(intake, together) == [[7, 4, 5]] * 5
    assert store.fields("session", 0)["state"] == "waiting"
    states = [store.fields("session", FIRST_NAMED + k).get("state") for k in range(1, 6)]
    assert states == ["done", "waiting", "waiting", "done", None]


@needs_redis
def test_another_intake_goes_on_with_what_one_began(store):
    async def ask(intake: SessionIntake, ids: list[int]) -> tuple[list[int], list[int]]:
        return await answer(intake, request(ids, 1, session="a")), await answer(intake, request(FIRST, 1))

    for ids in (FIRST, [*FIRST, 7, 9]):
        intake = intake_of(store)
        assert served(intake, partial(ask, intake, ids)) == ([7], [7])
    assert store.fields("session", FIRST_NAMED + 1)["round"] == "1"


@needs_redis
def test_what_a_session_can_not_be_asked(store):
    intake = intake_of(store)

    async def refused(asked: dict[str, Any]) -> str:
        with pytest.raises(UserError) as caught:
            await answer(intake, asked)
        return str(caught.value)

    async def turns() -> list[str]:
        under_way = asyncio.ensure_future(answer(intake, request(FIRST, 20, session="1")))
        await asyncio.sleep(0)
        said = [await refused(request([*FIRST, 9], session="1"))]
        await under_way
        await answer(intake, request(FIRST, 3, session="2"))
        said += [
            await refused(request(ids, session="2")) for ids in ([1, 2, 3], [1, 2, 3, 7, 4, 5], [1, 2, 3, 7, 9, 5, 6])
        ]
        await answer(intake, request([1, 2, 3, 7, 4, 5, 6], session="2", final=True))
        said.append(await refused(request([1, 2, 3, 7, 4, 5, 6, 7, 7], session="2")))
        return said

    busy, *wrong, over = served(intake, turns)
    assert busy == "session '1' waits for an answer: ask after it"
    assert {*wrong} == {
        "session '2': the prompt must begin with the session's 6 tokens, answers included, and add some"
    }
    assert over == "session '2' has ended: give another its own name"


@needs_redis
@pytest.mark.parametrize("leaves_after", [0, 2])
def test_a_client_that_leaves_ends_its_round_and_its_session_begins_anew(store, leaves_after):
    intake = intake_of(store)

    async def leave() -> list[list[int]]:
        before = await answer(intake, request(FIRST, session="3"))
        got = await answer(intake, request([*FIRST, *before, 9], 56, session="3"), leaves_after=leaves_after)
        assert len(got) < 56
        assert store.fields("session", 3)["state"] == "left"
        assert (store.read("ids", 3), store.client.smembers(store.key("bound", 0))) == (b"", set())
        return [await answer(intake, request(SECOND, session="3")), await answer(intake, request(FIRST, session="4"))]

    assert served(intake, leave) == [[7, 4, 5], [7, 4, 5]]
    assert store.fields("session", 3)["epoch"] == "1"


@needs_redis
def test_one_that_is_dropped_as_it_hears_of_tokens_is_given_up_too(store):
    intake = intake_of(store)

    async def drop() -> None:
        task = asyncio.ensure_future(answer(intake, request(FIRST, 60, session="3")))
        while len(store.ids(3)) < 40:  # where it stands still
            await asyncio.sleep(0.01)
        intake._under_way[3].set()
        await asyncio.sleep(0)
        task.cancel()
        assert await asyncio.wait({task}, timeout=60) == ({task}, set())
        assert task.cancelled()

    served(intake, drop, is_kept=False)
    assert store.fields("session", 3)["state"] == "left"


@needs_redis
def test_an_answer_that_is_dropped_is_given_up_too(store):
    """As where the frontend is lost, and with it who asked."""
    intake = intake_of(store)

    async def drop() -> list[int]:
        task = asyncio.ensure_future(answer(intake, request(FIRST, 60, session="3")))
        while not store.read("ids", 3):
            await asyncio.sleep(0.001)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert store.fields("session", 3)["state"] == "left"
        return await answer(intake, request(FIRST, session="3"))

    assert served(intake, drop) == [7, 4, 5]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (request([]), "prompt is empty"),
        (request([1000]), "prompt has a token id outside 0 to 999"),
        (request([-1]), "prompt has a token id outside 0 to 999"),
        (request([1], stop_conditions={"max_tokens": None}), "max_tokens=None"),
        (request([1], 0), "max_tokens=0"),
        (request([1] * 60, 5), "prompt of 60 tokens and max_tokens=5 are more than the 64 a worker holds"),
        (request([1], stop_conditions={"ignore_eos": None}), "ignore_eos must be true"),
        (request([1], stop_conditions={"stop": ["."]}), "stop=['.'] has no effect here"),
        (request([1], sampling_options={"temperature": 0.7}), "temperature=0.7"),
        (request([1], sampling_options={"n": 2}), "n=2"),
        (request([1], output_options={"logprobs": 1}), "logprobs=1"),
    ],
)
def test_what_workers_can_not_do_is_refused(asked, said):
    with pytest.raises(UserError) as caught:
        LiveRequest.of(asked, LIMITS)
    assert said in str(caught.value)


def test_what_is_asked():
    assert LiveRequest.of(request([1] * 60, 4), LIMITS).is_last
    assert not LiveRequest.of(request([1], session="x"), LIMITS).is_last
    assert LiveRequest.of(request([1], session="x", final=True), LIMITS).is_last


def test_what_the_component_is_told_comes_through_a_file(tmp_path):
    deciding = Deciding(
        url="redis://x",
        prefix="{p}",
        binder=LeastKvMemory(),
        router=RemoteOnly("random", seed=3),
        estimator=None,
        window_s=1.0,
        lease_s=2.0,
    )
    spec = RouterSpec(deciding=deciding, limits=LIMITS, model="m", served_name="s")
    spec.write(tmp_path / "spec")
    found = RouterSpec.read(tmp_path / "spec")
    assert (found.limits, found.deciding.url) == (LIMITS, "redis://x")
    assert vars(found.deciding.router)["_rng"].random() == vars(deciding.router)["_rng"].random()
