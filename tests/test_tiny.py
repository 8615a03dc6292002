from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.tiny import BOS, EOS, PAD, VOCAB, tiny_config


def test_each_byte_is_one_token_of_its_own_value(tiny_folder: Callable[[str], Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder("olmoe"))
    text = "Hello,  wörld!\n\t日本 🙂"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (PAD, BOS, EOS)
    assert len(tokenizer) == VOCAB
    assert tokenizer.is_fast


def test_chat_template_ends_with_a_generation_prompt(tiny_folder: Callable[[str], Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder("olmoe"))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|system|>Be brief.\n<|user|>Hi\n<|assistant|>"


def test_an_unknown_override_is_an_error() -> None:
    with pytest.raises(ValueError, match="n_experts"):
        tiny_config("olmoe", n_experts=3)
