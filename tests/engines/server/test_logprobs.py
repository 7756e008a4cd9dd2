"""The texts of tokens put together are the whole, whatever a tokenizer cuts apart; and log probabilities are JSON."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizers import BYTES
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engines.ar.sampling import Logprobs
from engines.models.tokenizer import Speller
from engines.server.answer import ScoredTokens, TokenTexts, join_logprobs, prompt_logprobs, scores_of


def byte_level(*merges: tuple[str, str]) -> Tokenizer:
    vocab = {token: i for i, token in enumerate([*BYTES, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[*merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return tokenizer


def sentence_pieces() -> Tokenizer:
    """As Llama-2's: blanks begin words, and what no piece has falls back to bytes."""
    pieces = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581", *"abcdefgh", "\u2581a", "\u2581the"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[("\u2581", "a")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


TOKENIZERS = {"byte-level": byte_level(), "sentence-pieces": sentence_pieces()}


def texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    found, each = [], TokenTexts(Speller(tokenizer))
    for token in ids:
        found.append(each.text_of(token))
        each.add(token)
    return found


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text(st.sampled_from("abc é🙂世 \n"), min_size=1, max_size=12))
def test_texts_of_tokens_are_the_text(name, text):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(texts(tokenizer, ids)) in (text, f" {text}")


@given(ids=st.lists(st.integers(0, 256), max_size=12))
def test_texts_of_any_bytes_are_the_text_up_to_half_a_character(ids):
    """Bytes that make no character are told once it is sure that none comes."""
    tokenizer = TOKENIZERS["byte-level"]
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    found = "".join(texts(tokenizer, ids))
    assert whole.replace("\ufffd", "").startswith(found.replace("\ufffd", ""))
    assert len(whole.replace("\ufffd", "")) - len(found.replace("\ufffd", "")) == 0


def test_the_bytes_of_a_character_add_it_at_its_last_and_special_tokens_are_spelt():
    tokenizer = TOKENIZERS["byte-level"]
    ids = [*tokenizer.encode("a🙂b").ids, len(BYTES)]
    assert texts(tokenizer, ids) == ["a", "", "", "", "🙂", "b", "<|end|>"]


def test_a_token_that_ends_within_a_character_leaves_all_its_text_to_the_next():
    """Tokenizers merge a blank, or a whole character, with the first bytes of another."""
    blank, lead, rest = (
        pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(" é")[0][0][i] for i in range(3)
    )
    tokenizer = byte_level((blank, lead))
    half, last, a = (tokenizer.token_to_id(each) for each in (blank + lead, rest, "a"))
    assert texts(tokenizer, [half, last, a]) == ["", " é", "a"]
    # Bytes that no character comes of are not told, what follows is as ever.
    assert texts(tokenizer, [half, a, half, half, last]) == ["", "a", "", "", " é"]


def test_tokens_named_by_ids_have_the_bytes_of_their_text():
    speller = Speller(TOKENIZERS["byte-level"])
    ids = TOKENIZERS["byte-level"].encode("é").ids
    scores = [*scores_of(logprobs(*[(-0.5, [])] * len(ids)))]
    told = ScoredTokens(speller, is_chat=True, has_names=False).logprobs_field(ids, scores)["content"]
    assert [each["token"] for each in told] == [f"token_id:{token}" for token in ids]
    assert bytes(value for each in told for value in each["bytes"]).decode() == "é"


def logprobs(*rows: tuple[float, list[tuple[int, float]]]) -> Logprobs:
    return Logprobs(
        np.array([row[0] for row in rows], dtype=np.float32),
        np.arange(1, len(rows) + 1),
        np.array([[token for token, _ in row[1]] for row in rows]),
        np.array([[logprob for _, logprob in row[1]] for row in rows], dtype=np.float32),
    )


def test_words_are_json_where_a_token_cannot_be_and_parts_are_joined():
    speller = Speller(TOKENIZERS["byte-level"])
    ids = TOKENIZERS["byte-level"].encode("ab").ids
    scores = list(scores_of(logprobs((-np.inf, [(ids[1], -0.5)]), (-0.5, [(ids[1], -0.5)]))))
    tokens = ScoredTokens(speller, is_chat=False)
    parts = [tokens.logprobs_field([token], [score]) for token, score in zip(ids, scores, strict=True)]
    assert join_logprobs(parts) == {
        "text_offset": [0, 1],
        "token_logprobs": [-9999.0, -0.5],
        "tokens": ["a", "b"],
        "top_logprobs": [{"a": -9999.0, "b": -0.5}, {"b": -0.5}],
    }
    json.dumps(join_logprobs(parts), allow_nan=False)
    assert prompt_logprobs(ids, [None, scores[1]], speller) == [
        None,
        {str(ids[1]): {"logprob": -0.5, "rank": 2, "decoded_token": "b"}},
    ]


def test_of_tokens_with_one_text_the_likeliest_stands():
    """Half characters have none: a harness that compares with the largest must not take a token for the likeliest."""
    speller = Speller(TOKENIZERS["byte-level"])
    first, second = TOKENIZERS["byte-level"].encode("é").ids[0], TOKENIZERS["byte-level"].encode("世").ids[0]
    (score,) = scores_of(logprobs((-3.0, [(second, -0.5), (first, -3.0)])))
    found = ScoredTokens(speller, is_chat=False).logprobs_field([first], [score])
    assert found["top_logprobs"] == [{"": -0.5}]
    assert found["token_logprobs"] == [-3.0]
