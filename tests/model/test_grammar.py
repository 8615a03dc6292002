"""Grammars over a byte tokenizer: what may come next, where a text may end, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from llguidance import LLMatcher

from raymoe.errors import CheckpointError, EngineError, RequestError
from raymoe.model.grammar import Grammars
from tests.tiny import EOS, VOCAB

Folder = Callable[[str], Path]
OTHER_END = 260


@pytest.fixture(scope="module")
def grammars(tiny_folder: Folder) -> Grammars:
    return Grammars(tiny_folder("olmoe"), VOCAB)


def allowed(grammar: object) -> set[int]:
    logits = torch.arange(VOCAB, dtype=torch.float32)
    masked = grammar.allow(logits)  # type: ignore[attr-defined]
    kept = masked.isfinite().nonzero().flatten()
    assert torch.equal(masked[kept], logits[kept]) and logits.isfinite().all()
    return set(kept.tolist())


def test_only_what_fits_may_come_and_an_end_where_the_text_may_end(grammars: Grammars) -> None:
    grammar = grammars.start(LLMatcher.grammar_from_regex("ab?c*"), [OTHER_END])
    assert allowed(grammar) == {ord("a")}
    grammar.accept(ord("a"))
    assert allowed(grammar) == {ord("b"), ord("c"), EOS, OTHER_END}
    grammar.accept(ord("b"))
    assert allowed(grammar) == {ord("c"), EOS, OTHER_END}
    assert grammar.ends_with(EOS) and not grammar.ends_with(OTHER_END) and grammar.failure is None


def test_behind_a_whole_text_only_ends_may_come(grammars: Grammars) -> None:
    grammar = grammars.start(LLMatcher.grammar_from_lark('start: "é"'), [OTHER_END])
    for byte in "é".encode():
        assert allowed(grammar) == {byte}
        grammar.accept(byte)
    assert allowed(grammar) == {EOS, OTHER_END}


def test_it_goes_on_behind_what_was_generated_elsewhere(grammars: Grammars) -> None:
    grammar = grammars.start(LLMatcher.grammar_from_regex("abc"), [], list(b"ab"))
    assert allowed(grammar) == {ord("c")}


def test_a_token_that_does_not_fit_is_a_failure_and_nothing_may_come_any_more(grammars: Grammars) -> None:
    grammar = grammars.start(LLMatcher.grammar_from_regex("abc"), [OTHER_END], list(b"ax"))
    assert allowed(grammar) == set()
    assert isinstance(grammar.failure, EngineError)


def test_a_wrong_grammar_and_a_folder_without_a_tokenizer_are_refused(
    grammars: Grammars, tmp_path: Path
) -> None:
    for grammar in ("{", LLMatcher.grammar_from_lark("start: foo")):
        with pytest.raises(RequestError, match="grammar") as caught:
            grammars.start(grammar, [])
        assert caught.value.param == "grammar"
    with pytest.raises(CheckpointError, match="tokenizer"):
        Grammars(tmp_path, VOCAB).start(LLMatcher.grammar_from_regex("a"), [])
