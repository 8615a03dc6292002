"""Grammars: which tokens may come next, so that a text fits a JSON schema, a regular expression or the like.

The work is llguidance's: it follows the grammar byte by byte, and the tokenizer's tokens along a trie, so no table
of the vocabulary is built for a grammar.

Shape letters: V the model's vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import llguidance.hf
import llguidance.numpy
import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor
from transformers import AutoTokenizer

from raymoe.errors import CheckpointError, EngineError, RequestError

log = logging.getLogger(__name__)


class Grammars:
    """Grammars over one checkpoint's tokenizer, which is read when the first of them comes: that takes a second."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder, self._vocab_size = folder, vocab_size

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        try:
            tokenizer = AutoTokenizer.from_pretrained(self._folder)
            return llguidance.hf.from_tokenizer(tokenizer, n_vocab=self._vocab_size)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self._folder}: its tokenizer can't follow grammars: {error}") from error

    def start(self, grammar: str, end_ids: Sequence[int], generated_ids: Sequence[int] = ()) -> Grammar:
        """Follow a grammar in llguidance's own form, from behind `generated_ids`; `end_ids` end a sequence.

        Raises:
            RequestError: the grammar is wrong, or too large.
            CheckpointError: there is no tokenizer that can do this.
        """
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(f"the grammar can't be followed: {matcher.get_error()[:500]}", "grammar")
        started = Grammar(matcher, self._tokenizer, end_ids)
        for token in generated_ids:
            started.accept(token)
        return started


class Grammar:
    """One sequence's way through its grammar."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer, end_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._own_ends = frozenset(tokenizer.eos_tokens)
        self._end_ids = torch.tensor([*end_ids], dtype=torch.long)
        self._bits = llguidance.numpy.allocate_token_bitmask(1, tokenizer.vocab_size)

    def allow(self, logits_V: Tensor) -> Tensor:
        """The logits with minus infinity for what may not come, in new memory.

        A token that ends the sequence may come wherever the text may end. None may come after a `failure`.
        """
        llguidance.numpy.fill_next_token_bitmask(self._matcher, self._bits, 0)
        if self.failure is not None:
            return torch.full_like(logits_V, float("-inf"))
        bits_V = np.unpackbits(self._bits[0].view(np.uint8), count=len(logits_V), bitorder="little")
        allowed_V = torch.from_numpy(bits_V.view(np.bool_))
        if self._matcher.is_accepting():
            allowed_V[self._end_ids] = True
        return logits_V.masked_fill(~allowed_V, float("-inf"))

    def ends_with(self, token: int) -> bool:
        """It stands for the end of the text in the grammar, whatever ends the sequence otherwise."""
        return token in self._own_ends

    def accept(self, token: int) -> None:
        """Go on behind a token that was allowed."""
        self._matcher.consume_token(token)

    @property
    def failure(self) -> EngineError | None:
        """Why it can't be followed further: llguidance gives up at its limits, or a token was not allowed."""
        if not self._matcher.is_error():
            return None
        return EngineError(f"the grammar can't be followed further: {self._matcher.get_error()[:500]}")
