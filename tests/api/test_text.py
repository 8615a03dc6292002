"""Text comes out whole, however its bytes are cut into tokens."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from raymoe.api.text import StopMatcher, TextDecoder
from tests.api.scripted import EOS, byte_tokenizer

BYTES = byte_tokenizer().backend_tokenizer

TEXTS = st.text(alphabet="ab\nü€😀\ufffd ", max_size=40)
STOPS = st.lists(st.text(alphabet="ab\nü😀", min_size=1, max_size=4), max_size=4)


def metaspace_tokenizer() -> Tokenizer:
    """Byte fallback and leading spaces, as SentencePiece models have them."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {"\u2581Hello": 256, "\u2581world": 257, "!": 258, "\u2581": 259}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def decoded(tokenizer: Tokenizer, ids: list[int], context: list[int] | None = None) -> list[str]:
    decoder = TextDecoder(tokenizer, context or [])
    return [*(decoder.push(token_id) for token_id in ids), decoder.finish()]


def test_a_character_of_four_tokens_comes_out_once_and_whole() -> None:
    assert decoded(BYTES, list("a😀b".encode())) == ["a", "", "", "", "😀", "b", ""]


def test_a_cut_character_is_shown_as_replacement_at_the_end() -> None:
    assert decoded(BYTES, list("a😀".encode())[:3]) == ["a", "", "", "\ufffd"]


def test_special_tokens_and_unknown_ids_have_no_text() -> None:
    assert decoded(BYTES, [97, EOS, 98, 5000, 99]) == ["a", "", "b", "", "c", ""]


@settings(deadline=None)
@given(st.lists(st.integers(0, 255), max_size=30))
def test_pieces_of_any_bytes_join_to_what_the_tokenizer_decodes(ids: list[int]) -> None:
    assert "".join(decoded(BYTES, ids)) == BYTES.decode(ids)


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([0x41, 0x80, 0xFF, 0xF0, 0x9F, 0x98, 0xC3, 0xA9, 256, 257, 259]), max_size=12)
)
def test_byte_fallback_with_invalid_bytes_never_fails(ids: list[int]) -> None:
    tokenizer = metaspace_tokenizer()
    joined = "".join(decoded(tokenizer, ids))
    assert joined.count("Hello") == tokenizer.decode(ids).count("Hello")


def test_a_completion_keeps_the_space_between_prompt_and_text() -> None:
    tokenizer = metaspace_tokenizer()
    assert "".join(decoded(tokenizer, [257, 258], context=[256])) == " world!"
    assert "".join(decoded(tokenizer, [257, 258])) == "world!"


def test_a_context_that_ends_inside_a_character_is_left_out() -> None:
    context = list("a😀".encode())[:3]
    assert "".join(decoded(BYTES, list(b"xy"), context=context)) == "xy"


def cut_by_stops(text: str, stops: list[str]) -> str:
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


@settings(deadline=None, max_examples=400)
@given(TEXTS, STOPS, st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_streamed_text_ends_right_before_the_earliest_stop(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    decoder, matcher, streamed = TextDecoder(BYTES), StopMatcher(stops), ""
    for token_id in text.encode():
        streamed += matcher.push(decoder.push(token_id))
    streamed += matcher.push(decoder.finish()) + matcher.finish()
    assert streamed == cut_by_stops(text, stops)
    assert matcher.stopped == any(stop in text for stop in stops)

    pieces, position, turn = [], 0, 0
    while position < len(text):
        pieces.append(text[position : position + sizes[turn % len(sizes)]])
        position, turn = position + len(pieces[-1]), turn + 1
    matcher = StopMatcher(stops)
    assert "".join([*map(matcher.push, pieces), matcher.finish()]) == streamed


def test_a_held_piece_is_released_when_the_stop_does_not_complete() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert [matcher.push(char) for char in "a\nUses"] == ["a", "", "", "", "", "\nUses"]


def test_a_later_shorter_stop_waits_for_an_earlier_longer_one() -> None:
    matcher = StopMatcher(["abcd", "c"])
    assert [matcher.push(char) for char in "xabc"] == ["x", "", "", ""]
    assert not matcher.stopped
    assert matcher.push("e") == "ab"
    assert matcher.stopped
