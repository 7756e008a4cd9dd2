"""Texts of answers that arrive in pieces: the pieces together are the whole, cut where it ends."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.served_echo import ByteCodec

from engines.errors import UserError
from engines.models.chat import EMBEDDED_CHAT, load_chat_template
from engines.models.checkpoint import EMBEDDED, TINY_DIR, config_of
from engines.models.tokenizer import load_tokenizer
from engines.server.answer import WINDOW, Answer, Piece, Stops
from engines.server.codec import TextCodec
from repro.prompt import answer_of

BYTES = ByteCodec()
TINY = TextCodec.of(TINY_DIR, config_of("tiny"))


def pieces_of(answer: Answer, ids: Sequence[int], cuts: Sequence[int]) -> list[Piece]:
    bounds = sorted({min(cut, len(ids)) for cut in cuts} | {0, len(ids)})
    found = []
    for start, end in zip(bounds[:-1] or [0], bounds[1:] or [0], strict=True):
        if answer.finish_reason is None:
            found.append(answer.add(ids[start:end], is_last=end == len(ids)))
    return found


def joined(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


class Counting(ByteCodec):
    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        self.num_decoded += len(ids)
        return super().decode(ids, skip_special=skip_special)


class Words:
    """As tokenizers of SentencePiece: every token has a blank in front of it, but for the first of a text."""

    end_ids: frozenset[int] = frozenset()
    eos_id = None
    shows_half_characters = True

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return "".join(f" w{i}" for i in ids if i).removeprefix(" ")


@settings(max_examples=10)
@given(ids=st.lists(st.sampled_from([*"abé€😀".encode(), 0xFF]), min_size=1, max_size=500), size=st.integers(1, 5))
def test_a_long_answer_told_token_by_token_is_its_text(ids, size):
    """Whole characters, halves, and bytes that are none."""
    pieces = pieces_of(Answer(BYTES), ids, range(0, len(ids), size))
    assert joined(pieces) == BYTES.decode(ids)
    words = pieces_of(Answer(Words()), ids, range(0, len(ids), size))
    assert joined(words) == Words().decode(ids)


@pytest.mark.parametrize("before", range(WINDOW - 2, WINDOW + 1))
def test_a_character_across_the_end_of_a_window_is_whole(before):
    text = "a" * before + "😀" * 2 * WINDOW
    ids = list(text.encode())
    assert joined(pieces_of(Answer(BYTES), ids, range(len(ids)))) == text


def test_an_answer_costs_its_length_and_not_the_square_of_it():
    codec = Counting()
    ids = list("é€ab".encode()) * 500
    pieces_of(Answer(codec), ids, range(len(ids)))
    assert codec.num_decoded < 3 * WINDOW * len(ids)


class WholeBytes(ByteCodec):
    shows_half_characters = False


@settings(max_examples=25)
@given(ids=st.lists(st.sampled_from([*"ab€😀".encode()]), min_size=1, max_size=16), size=st.integers(1, 20))
def test_half_a_character_at_the_end_is_no_text_of_a_causal_model(ids, size):
    """However it comes: up to the last byte that ended a whole one."""
    texts = [BYTES.decode(ids[:end]) for end in range(len(ids) + 1)]
    wanted = next(text for text in reversed(texts) if not text.endswith("\ufffd"))
    pieces = pieces_of(Answer(WholeBytes()), ids, range(0, len(ids), size))
    assert (joined(pieces), sum(len(piece.token_ids) for piece in pieces)) == (wanted, len(ids))


CUTS = st.lists(st.integers(0, 40), max_size=6)


@settings(max_examples=25)
@given(ids=st.lists(st.integers(3, 552), min_size=1, max_size=40), cuts=CUTS, end=st.integers(0, 60))
def test_pieces_are_the_text_that_generate_prints(ids, cuts, end):
    """Answers of any ids of the embedded model's vocabulary, broken characters among them, with an end of text or without."""
    ids[end:end] = [0] if end < len(ids) else []
    answer = Answer(TINY)
    pieces = pieces_of(answer, ids, cuts)
    wanted = answer_of(ids, "tiny", load_tokenizer(TINY_DIR))
    assert (joined(pieces), answer.finish_reason) == (wanted.text, wanted.finish_reason)
    assert answer.num_tokens == (end + 1 if 0 in ids else len(ids))
    assert [i for piece in pieces for i in piece.token_ids] == ids[: end + 1]


@settings(max_examples=25)
@given(
    text=st.text(alphabet="ab€", min_size=1, max_size=30),
    stop=st.lists(st.text(alphabet="ab€", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=CUTS,
)
def test_the_first_stop_text_ends_the_answer(text, stop, cuts):
    ids = list(text.encode())
    answer = Answer(BYTES, Stops(stop))
    pieces = pieces_of(answer, ids, cuts)
    found = [(at + len(each), at, each) for each in stop if (at := text.find(each)) >= 0]
    if not found:
        assert (joined(pieces), answer.finish_reason, answer.num_tokens) == (text, "length", len(ids))
        return
    # The one that is complete first, as token by token; of those that end together, the one asked for first.
    end, start, each = min(found, key=lambda it: it[0])
    assert (joined(pieces), pieces[-1].stop_reason) == (text[:start], each)
    least = len(text[:end].encode())
    assert least <= answer.num_tokens <= len(ids)
    if not cuts:
        assert answer.num_tokens == least
    shown = Answer(BYTES, Stops(stop, are_shown=True))
    assert joined(pieces_of(shown, ids, cuts)) == text[:end]


@settings(max_examples=25)
@given(text=st.text(alphabet="ab€", min_size=1, max_size=20), least=st.integers(0, 30), cuts=CUTS)
def test_a_stop_that_is_complete_before_the_least_length_is_none(text, least, cuts):
    ids = list(text.encode())
    answer = Answer(BYTES, Stops(["ab", "€"], min_tokens=least))
    pieces = pieces_of(answer, ids, cuts)
    held = len(BYTES.decode(ids[:least]))
    found = [(at + len(each), at) for each in ("ab", "€") if (at := text.find(each, max(0, held - len(each) + 1))) >= 0]
    if least >= len(ids) or not found:
        assert (joined(pieces), answer.finish_reason) == (text, "length")
    else:
        assert (joined(pieces), answer.finish_reason) == (text[: min(found)[1]], "stop")


def test_an_end_before_the_least_length_is_a_token_like_others():
    pieces = pieces_of(Answer(TINY, Stops(min_tokens=2)), [534, 0, 270, 0, 270], [1])
    assert (joined(pieces), pieces[-1].finish_reason) == (TINY.decode([534, 270]), "stop")
    assert sum(len(piece.token_ids) for piece in pieces) == 4


def test_an_end_that_is_ignored_is_a_token_like_others():
    answer = Answer(TINY, Stops(ignores_eos=True))
    pieces = pieces_of(answer, [534, 0, 270, 0], [2])
    assert (answer.finish_reason, answer.num_tokens) == ("length", 4)
    assert joined(pieces) == TINY.decode([534, 270])


@pytest.mark.parametrize("size", range(1, 7))
@pytest.mark.parametrize("length", range(1, 7))
def test_a_stop_text_is_found_however_it_streams(length, size):
    """Token by token or in pieces of ``size``, wherever in a piece it begins, and beside a longer one that never comes."""
    stop = "uvwxyz"[:length]
    for lead in range(size + 1):
        for others in ((), (stop + "!" * 3,)):
            ids = ("a" * lead + stop + "bc").encode()
            answer = Answer(BYTES, Stops((*others, stop)))
            pieces = pieces_of(answer, ids, range(0, len(ids), size))
            assert (joined(pieces), answer.finish_reason) == ("a" * lead, "stop")


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_models_are_told_a_story(name):
    assert TextCodec.of(EMBEDDED[name], config_of(name)).template is EMBEDDED_CHAT


def test_a_mask_is_no_text_even_among_special_tokens():
    assert TINY.decode([TINY.mask_id, *TINY.encode("3"), TINY.mask_id], skip_special=False) == TINY.decode(
        TINY.encode("3")
    )


def test_a_conversation_needs_the_tokens_of_its_format(tmp_path):
    codec = replace(TINY, template=load_chat_template(tmp_path, "dream"))
    with pytest.raises(UserError, match=r"no <\|im_start\|> for the dream format"):
        codec.encode_chat([{"role": "user", "content": "Hi"}])
