"""Tokens as bytes and as text, for the three ways in which tokenizers write them."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models

from raymoe.api.spelling import Speller
from tests.api.scripted import EOS, byte_tokenizer
from tests.api.test_text import metaspace_tokenizer


def test_a_byte_level_token_is_its_byte() -> None:
    speller = Speller(byte_tokenizer().backend_tokenizer)
    assert b"".join(speller.spell(token) for token in range(256)) == bytes(range(256))
    assert [speller.text(token) for token in "é😀 a".encode()][-2:] == [" ", "a"]
    assert speller.text(0xF0) == "\ufffd" and speller.key(0xF0) == "bytes:\\xf0"
    assert speller.key(ord("a")) == "a"


def test_special_tokens_are_spelled_out_and_unknown_ids_are_nothing() -> None:
    speller = Speller(byte_tokenizer().backend_tokenizer)
    assert (speller.spell(EOS), speller.text(EOS), speller.key(EOS)) == (b"<eos>", "<eos>", "<eos>")
    assert (speller.spell(99999), speller.text(99999), speller.key(99999)) == (b"", "", "")


def test_byte_fallback_and_spaces_in_front() -> None:
    tokenizer = metaspace_tokenizer()
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    speller = Speller(backend)
    spelled = {backend.id_to_token(i): speller.spell(i) for i in range(backend.get_vocab_size())}
    assert all(bytes.fromhex(token[3:5]) == got for token, got in spelled.items() if token.startswith("<0x"))
    spaced = {token: got for token, got in spelled.items() if token.startswith("▁")}
    assert spaced and all(got == token.replace("▁", " ").encode() for token, got in spaced.items())


def test_a_tokenizer_without_a_decoder_and_one_of_words() -> None:
    vocab = {"a": 0, "the": 1, "##re": 2}
    plain = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    assert Speller(plain).text(1).strip() == "the"
    plain.decoder = decoders.WordPiece()
    assert Speller(plain).spell(2) == b"re"
    assert Speller(plain).spell(1) == b" the"
