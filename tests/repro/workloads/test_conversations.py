"""Conversations: the published shares by construction, real files in every format there is, and what is refused."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tables import data_beside

from engines.errors import UserError
from repro.reports.claims import load_claims
from repro.workloads.conversations import ConversationConfig, Conversations, draw_conversations, load_conversation_card
from repro.workloads.recorded import read_chats

REFUSED = data_beside(__file__, "refused")

REAL_DATA = os.environ.get("REPRO_DATA_DIR")


def drawn(dataset: str = "lmsys-chat-1m", num_turns: int = 400, seed: int = 1, **change: Any) -> Conversations:
    return draw_conversations(ConversationConfig(dataset=dataset, num_turns=num_turns, seed=seed, **change))


def prompts(conversations: Conversations) -> list[int]:
    return [turn.prefill_tokens for session in conversations.sessions for turn in session.rounds]


@pytest.mark.parametrize("seed", [0, 1, 7])
@pytest.mark.parametrize("num_turns", [1, 50, 3000])
def test_every_sample_has_the_papers_shares_to_one_prompt(num_turns, seed):
    conversations = drawn(num_turns=num_turns, seed=seed)
    stated = {claim.id: claim.expected.value for claim in load_claims("laps")}
    expected = {"first": stated["laps-first-turn-short"], "later": stated["laps-later-turn-short"]}
    counts = {"first": len(conversations.sessions), "later": conversations.num_turns - len(conversations.sessions)}
    for name, share in conversations.provenance.shares.items():
        assert abs(100 * share - float(str(expected[name]))) <= 100 / counts[name]


def test_prompts_above_1000_tokens_are_as_rare_as_the_card_says():
    sessions = drawn(num_turns=8000).sessions
    first = np.array([session.rounds[0].prefill_tokens for session in sessions])
    later = np.array([turn.prefill_tokens for session in sessions for turn in session.rounds[1:]])
    assert (first > 1000).mean() == pytest.approx(0.07, abs=1e-3)
    assert (later > 1000).mean() == pytest.approx(0.03, abs=1e-3)
    assert np.median(first) == pytest.approx(172, abs=1.5)
    assert np.median(later) == pytest.approx(78, abs=1.5)
    assert later.min() >= 4
    assert first.max() <= 8192


@given(low=st.integers(1, 900), width=st.integers(0, 4000), seed=st.integers(0, 99))
def test_a_band_holds_prompts_of_it_alone_and_no_history(low, width, seed):
    conversations = drawn(num_turns=30, seed=seed, low=low, high=low + width)
    bounds = load_conversation_card("lmsys-chat-1m").bounds
    assert all(max(low, bounds.low) <= tokens <= max(low + width, bounds.low) for tokens in prompts(conversations))
    assert {len(session.rounds) for session in conversations.sessions} == {1}


def said(role: str, text: str, *turns: tuple[str, int]) -> list[dict[str, str]]:
    """Turns of letters, as many as told."""
    return [{role: who, text: "x" * num} for who, num in turns]


LMSYS_TOLD = said("role", "content", ("user", 400), ("assistant", 80), ("user", 40), ("assistant", 20))
LMSYS_ROWS = [
    {"conversation_id": "a", "model": "vicuna-13b", "conversation": LMSYS_TOLD, "turn": 2},
    {"conversation_id": "b", "conversation": said("role", "content", ("user", 8))},
]
SHAREGPT_TOLD = said("from", "value", ("gpt", 29), ("system", 40), ("human", 40), ("human", 4), ("gpt", 12))
SHAREGPT_ROWS = [{"id": "s_0", "conversations": SHAREGPT_TOLD}, {"id": "empty", "conversations": []}]
SHAREGPT_TURNS = [(21, 3)]
LMSYS_TURNS = [(100, 20), (10, 5)]


def lengths(path: Path) -> list[list[tuple[int, int | None]]]:
    return [[(turn.prefill_tokens, turn.decode_tokens) for turn in chat.rounds] for chat in read_chats([path])]


def test_lmsys_rows_of_a_parquet_shard(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as parquet

    path = tmp_path / "train-00000-of-00006.parquet"
    parquet.write_table(pa.Table.from_pylist(LMSYS_ROWS), path)
    assert lengths(path) == [LMSYS_TURNS, [(2, None)]]


@pytest.mark.parametrize("size", [1, 7, 64, 10**6])
def test_an_array_is_read_in_pieces(tmp_path, size, monkeypatch):
    monkeypatch.setattr("repro.workloads.rows._CHUNK", size)
    path = tmp_path / "split.json"
    path.write_text(" \n" + json.dumps([*SHAREGPT_ROWS, *LMSYS_ROWS], indent=1) + "\n")
    assert lengths(path) == [SHAREGPT_TURNS, LMSYS_TURNS, [(2, None)]]


@pytest.mark.parametrize(("name", "text", "message"), REFUSED["chats"])
def test_damaged_files_are_refused_in_one_line(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError) as refused:
        read_chats([path])
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_missing_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("REPRO_DATA_DIR", raising=False)
    with pytest.raises(UserError, match=r"no file for dataset 'lmsys-chat-1m' in any data directory.*parquet"):
        drawn(source="local")
    for name in ("none.jsonl", "none.parquet"):
        with pytest.raises(UserError, match="does not exist"):
            read_chats([tmp_path / name])


def test_a_data_directory_is_looked_through_by_the_cards_patterns(tmp_path):
    folder = tmp_path / "lmsys-chat-1m"
    folder.mkdir()
    for shard in ("b", "a"):
        (folder / f"{shard}.jsonl").write_text(json.dumps({"rounds": [[ord(shard), 1]]}) + "\n")
    config = ConversationConfig(dataset="lmsys-chat-1m", num_turns=2, seed=0, source="local")
    found = draw_conversations(config, data_dir=tmp_path)
    assert sorted(prompts(found)) == [ord("a"), ord("b")]
    assert found.provenance.location == "a.jsonl, b.jsonl"


@pytest.mark.skipif(REAL_DATA is None, reason="needs first prompts of ShareGPT in REPRO_DATA_DIR")
def test_real_first_prompts_have_the_share_the_card_quotes():
    found = drawn("sharegpt", num_turns=1000, source="local")
    assert found.provenance.shares["first"] == pytest.approx(0.66, abs=0.01)


@pytest.mark.parametrize(("change", "message"), REFUSED["conversations"])
def test_nonsense_is_refused(change, message):
    with pytest.raises(UserError, match=message):
        drawn(**change)
