"""Texts without what nobody sees, and that nothing else of them is lost."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymoe.api.hygiene import Hygiene, normalise
from tests.api.scripted import ScriptedBackend, byte_tokenizer, chat, complete, make_service, run


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("Paris\u200b?", "Paris?"),
        ("a\u200d\u200cb\u00ad\ufeff\u2060c", "abc"),
        ("a\x00\x07\x1b[31mb\x7f\x85c", "a[31mbc"),
        ("line\r\n\tend\n", "line\r\n\tend\n"),
        ("ﬁne Ｗｉｄｅ ①²", "fine Wide 12"),
        ("e\u200b\u0301", "é"),
        ("\u202eevil\u2066", "evil"),
        ("hidden\U000e0041\U000e007f", "hidden"),
        # Joiners that mean something: Persian, Hindi, a family.
        ("می\u200cخواهم", "می\u200cخواهم"),
        ("क्\u200dष", "क्\u200dष"),
        ("👩\u200d👧 ok", "👩\u200d👧 ok"),
        ("❤\ufe0f", "❤\ufe0f"),
        ("中\u200d\u200d中\u200d", "中中"),
        ("\u0600\u0661", "\u0600\u0661"),
        ("", ""),
    ],
)
def test_examples(text: str, cleaned: str) -> None:
    assert normalise(text) == cleaned


@given(
    st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\u200b\u200c\u200d\u0301eＡ中\x00"))
)
@settings(max_examples=500)
def test_nothing_unseen_is_left_and_a_second_time_changes_nothing(text: str) -> None:
    cleaned = normalise(text)
    assert normalise(cleaned) == cleaned
    assert unicodedata.is_normalized("NFKC", cleaned)
    assert not {*cleaned} & {*"\x00\x1f\x7f\x9f\u200b\u00ad\u202e\ufeff\u2060"}


@given(st.text("abcXYZ 019.,!?äöüßñçλжあ漢字한국어🙂\n\t"))
def test_ordinary_text_is_not_touched(text: str) -> None:
    text = unicodedata.normalize("NFKC", text)
    assert normalise(text) == text


def test_texts_are_found_at_any_depth_and_names_stay() -> None:
    changes: list[int] = []
    value = {"role\u200b": "user", "content": ["a\u200b", {"x": "b", "y": 3, "z": None}]}
    cleaned = Hygiene(lambda: changes.append(1)).clean(value)
    assert cleaned == {"role\u200b": "user", "content": ["a", {"x": "b", "y": 3, "z": None}]}
    assert len(changes) == 1


def prompts(*, clean: bool, body: dict[str, object]) -> tuple[list[str], str]:
    backend = ScriptedBackend()
    service = make_service(backend, clean=clean)
    assert (chat if "messages" in body else complete)(service, **body).status_code == 200
    counted = next(
        line.split()[1]
        for line in service.metrics.render().decode().splitlines()
        if line.startswith("raymoe_normalised_texts_total")
    )
    return [bytes(request.prompt_ids).decode() for request in backend.requests], counted


def test_it_is_off_unless_turned_on_and_counted_then() -> None:
    body: dict[str, object] = {"prompt": ["x\u200b", "y"]}
    assert prompts(clean=False, body=body) == (["x\u200b", "y"], "0.0")
    assert prompts(clean=True, body=body) == (["x", "y"], "1.0")


def test_messages_are_cleaned_before_the_template_whose_own_text_stays() -> None:
    body: dict[str, object] = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a\u200bﬁ"}]}]
    }
    template = "｜{{ messages[0].content }}\u200b"
    backend = ScriptedBackend()
    service = make_service(backend, tokenizer=byte_tokenizer(template=template), clean=True)
    assert chat(service, **body).status_code == 200
    assert bytes(backend.requests[0].prompt_ids).decode() == "｜afi\u200b"


def test_token_ids_are_not_text() -> None:
    ids = list("x\u200b".encode())
    assert prompts(clean=True, body={"prompt": ids})[0] == ["x\u200b"]


def test_a_prompt_of_nothing_else_is_empty() -> None:
    response = complete(make_service(ScriptedBackend(), clean=True), prompt="\u200b")
    assert response.status_code == 400


def test_a_long_text_is_cleaned_too() -> None:
    service = make_service(ScriptedBackend(), clean=True)
    ids = run(service._tokens.encode("a\u200b" * 20_000))
    assert bytes(ids) == b"a" * 20_000
