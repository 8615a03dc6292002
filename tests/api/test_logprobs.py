"""Log probabilities as clients see them: shapes, places in the text, streams, stops, characters, echo, best_of."""

from __future__ import annotations

import json
from typing import Any

import pytest

from raymoe.api.logprobs import (
    LEAST,
    Scored,
    chat_logprobs,
    completion_logprobs,
    mean_logprob,
    prompt_logprobs,
)
from raymoe.api.spelling import Speller
from raymoe.engine.messages import GenerateRequest, TokenLogprob
from tests.api.scripted import (
    BOS,
    CONTEXT,
    EOS,
    ScriptedBackend,
    byte_tokenizer,
    chat,
    complete,
    error_of,
    events,
    make_service,
    run,
    score,
)
from tests.api.test_sse import official

USER = [{"role": "user", "content": "x"}]
SPELLER = Speller(byte_tokenizer().backend_tokenizer)


def joined(pieces: list[dict[str, Any] | None]) -> dict[str, Any]:
    """Log probabilities of all chunks of a stream together."""
    whole: dict[str, Any] = {}
    for piece in filter(None, pieces):
        for key, value in piece.items():
            whole[key] = whole.get(key, []) + value if isinstance(value, list) else value
    return whole


def streamed(ask: Any, backend: ScriptedBackend, index: int = 0, **body: Any) -> dict[str, Any]:
    chunks = events(ask(make_service(backend), stream=True, **body).text)
    own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    assert own[-1]["logprobs"] is None
    return joined([choice["logprobs"] for choice in own])


@pytest.mark.parametrize("sizes", [(1,), (2, 3), (50,)])
def test_a_completion_has_one_entry_a_token_in_both_ways(sizes: tuple[int, ...]) -> None:
    backend = ScriptedBackend("héy", sizes=sizes)
    choice = complete(make_service(backend), prompt="x", logprobs=2).json()["choices"][0]
    said = list("héy".encode())
    found = choice["logprobs"]
    assert found["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "y"]
    assert found["text_offset"] == [0, 1, 1, 2]
    assert found["token_logprobs"] == [score(token, 0).logprob for token in said]
    assert [len(top) for top in found["top_logprobs"]] == [3] * 4
    assert found["top_logprobs"][0] == {"i": -0.125, "j": -0.25, "h": score(ord("h"), 0).logprob}
    assert streamed(complete, backend, prompt="x", logprobs=2) == found


def test_without_being_asked_for_there_are_none() -> None:
    backend = ScriptedBackend("abc")
    assert complete(make_service(backend), prompt="x").json()["choices"][0]["logprobs"] is None
    assert chat(make_service(backend), messages=USER).json()["choices"][0]["logprobs"] is None
    assert streamed(chat, backend, messages=USER) == {}
    assert all(request.logprobs is None is request.prompt_logprobs for request in backend.requests)


@pytest.mark.parametrize("top", [0, 3])
def test_a_chat_has_bytes_and_as_many_likeliest_as_asked_for(top: int) -> None:
    backend = ScriptedBackend("a😀")
    body = {"messages": USER, "logprobs": True, "top_logprobs": top, "n": 2}
    for index, choice in enumerate(chat(make_service(backend), **body).json()["choices"]):
        found = choice["logprobs"]
        assert found["refusal"] is None
        assert bytes(byte for entry in found["content"] for byte in entry["bytes"]).decode() == "a😀"
        assert [entry["token"] for entry in found["content"]] == ["a", *["\ufffd"] * 4]
        assert [len(entry["top_logprobs"]) for entry in found["content"]] == [top] * 5
        assert found["content"][0]["logprob"] == score(ord("a"), 0).logprob
        assert streamed(chat, backend, index, **body) == found


def test_a_character_of_several_tokens_brings_all_their_entries_at_once() -> None:
    chunks = events(
        chat(make_service(ScriptedBackend("a😀b")), messages=USER, logprobs=True, stream=True).text
    )
    pieces = [c["choices"][0] for c in chunks[1:-1]]
    assert [(p["delta"]["content"], len(p["logprobs"]["content"])) for p in pieces] == [
        ("a", 1),
        ("😀", 4),
        ("b", 1),
    ]


@pytest.mark.parametrize(
    ("said", "stop", "tokens"),
    [
        ("abc\nUser: x", "\nUser:", "abc"),
        ("abc\nUses", "\nUser:", "abc\nUses"),
        ("xab", "x", ""),
        ("ab\nU", "\nUser:", "ab\nU"),
    ],
)
@pytest.mark.parametrize("sizes", [(1,), (3, 1, 2), (50,)])
def test_tokens_that_a_stop_string_cut_off_have_no_entry(
    said: str, stop: str, tokens: str, sizes: tuple[int, ...]
) -> None:
    backend = ScriptedBackend(said, sizes=sizes)
    body: dict[str, Any] = {"prompt": "x", "stop": stop, "logprobs": 0}
    choice = complete(make_service(backend), **body).json()["choices"][0]
    assert choice["text"] == tokens
    assert "".join(choice["logprobs"]["tokens"]) == tokens
    assert streamed(complete, backend, **body).get("tokens", []) == choice["logprobs"]["tokens"]


def test_an_entry_is_never_ahead_of_its_text() -> None:
    chunks = events(
        complete(make_service(ScriptedBackend("ab-c-d")), prompt="x", stop="-d", logprobs=0, stream=True).text
    )
    text, tokens = "", ""
    for choice in (chunk["choices"][0] for chunk in chunks[:-1]):
        text += choice["text"]
        tokens += "".join(choice["logprobs"]["tokens"])
        assert text == tokens
    assert text == "ab-c"


def test_special_tokens_without_text_have_entries_and_half_a_character_has_too() -> None:
    backend = ScriptedBackend(lambda request: [ord("a"), 258, ord("b"), 0xF0])  # 258: <eot>
    choice = complete(make_service(backend), prompt="x", logprobs=0).json()["choices"][0]
    assert choice["text"] == "ab\ufffd"
    assert choice["logprobs"]["tokens"] == ["a", "<eot>", "b", "bytes:\\xf0"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2]
    assert streamed(complete, backend, prompt="x", logprobs=0) == choice["logprobs"]


def test_infinities_are_written_as_numbers_that_json_has() -> None:
    score = TokenLogprob(float("-inf"), 3, ((97, 0.0), (98, float("-inf"))))
    scored = [Scored(99, 0, score)]
    for shape in (
        completion_logprobs(scored, 2, SPELLER),
        chat_logprobs(scored, 2, SPELLER),
        {"x": prompt_logprobs([1, 99], [score], 2, SPELLER)},
    ):
        assert str(LEAST) in json.dumps(shape, allow_nan=False)


def test_of_tokens_that_are_written_alike_the_likelier_counts() -> None:
    # The tokenizer knows neither, as where a model's vocabulary is larger: both are written as nothing.
    scored = Scored(9001, 0, TokenLogprob(-3.0, 2, ((9002, -0.5),)))
    shape = completion_logprobs([scored], 1, SPELLER)
    assert (shape["top_logprobs"], shape["token_logprobs"]) == ([{"": -0.5}], [-3.0])


# Echo and the prompt's own.


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("prompt", ["pré", list("pré".encode())])
def test_an_echo_stands_in_front_with_its_entries(prompt: Any, bos: bool, stream: bool) -> None:
    backend = ScriptedBackend("xy")
    service = make_service(backend, tokenizer=byte_tokenizer(bos=bos))
    body = {"prompt": prompt, "echo": True, "logprobs": 1}
    ids = [*([BOS] if bos and isinstance(prompt, str) else []), *"pré".encode()]
    if stream:
        choices = [c["choices"][0] for c in events(complete(service, **body, stream=True).text)]
        text, found = "".join(c["text"] for c in choices), joined([c["logprobs"] for c in choices])
    else:
        choice = complete(service, **body).json()["choices"][0]
        text, found = choice["text"], choice["logprobs"]
    assert text == "préxy"
    assert [len(value) for value in found.values()] == [len(ids) + 2] * 4
    assert found["token_logprobs"][0] is None is found["top_logprobs"][0]
    assert found["token_logprobs"][1:] == [score(token, 0).logprob for token in (*ids, *b"xy")][1:]
    assert found["text_offset"][len(ids) - 4 :] == [0, 1, 2, 2, 3, 4]
    assert found["tokens"][-2:] == ["x", "y"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_prompt_can_be_scored_without_generating(logprobs: int | None, stream: bool) -> None:
    backend = ScriptedBackend("never")
    service = make_service(backend)
    body = {"prompt": ["abcdef", "g"], "echo": True, "logprobs": logprobs, "max_tokens": 0}
    if stream:
        chunks = events(complete(service, **body, stream=True, stream_options={"include_usage": True}).text)
        usage = chunks[-1]["usage"]
        choices = [[c for chunk in chunks for c in chunk["choices"] if c["index"] == i] for i in (0, 1)]
        texts = ["".join(c["text"] for c in own) for own in choices]
        ends = [own[-1]["finish_reason"] for own in choices]
    else:
        answer = complete(service, **body).json()
        usage = answer["usage"]
        texts = [choice["text"] for choice in answer["choices"]]
        ends = [choice["finish_reason"] for choice in answer["choices"]]
        if logprobs:
            assert answer["choices"][1]["logprobs"]["token_logprobs"] == [None]
    assert (texts, ends) == (["abcdef", "g"], ["length", "length"])
    assert usage == {"prompt_tokens": 7, "completion_tokens": 0, "total_tokens": 7}
    assert [request.max_tokens for request in backend.requests] == ([0, 0] if logprobs else [])


def test_a_prompt_that_fills_the_context_can_be_scored() -> None:
    body: dict[str, Any] = {"prompt": "x" * CONTEXT, "echo": True, "logprobs": 0}
    assert complete(make_service(ScriptedBackend()), **body, max_tokens=0).status_code == 200
    for other in ({"max_tokens": 1}, {}, {"max_tokens": 0, "prompt": "x" * (CONTEXT + 1)}):
        response = complete(make_service(ScriptedBackend()), **{**body, **other})
        assert error_of(response)["code"] == "context_length_exceeded"


def test_an_echo_of_ids_that_end_within_a_character_goes_on_there() -> None:
    backend = ScriptedBackend(lambda request: [0x98, 0x80, ord("!")])
    answer = complete(make_service(backend), prompt=[ord("a"), 0xF0, 0x9F], echo=True, logprobs=0)
    choice = answer.json()["choices"][0]
    assert choice["text"] == "a😀!"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 1, 2]


def test_a_stop_string_is_not_looked_for_in_the_echo() -> None:
    choice = complete(make_service(ScriptedBackend("b-c")), prompt="a-", echo=True, stop="-").json()[
        "choices"
    ][0]
    assert (choice["text"], choice["finish_reason"]) == ("a-b", "stop")


@pytest.mark.parametrize("ask", [complete, chat])
def test_prompt_logprobs_have_vllms_shape(ask: Any) -> None:
    backend = ScriptedBackend("x")
    body = {"prompt": "abc"} if ask is complete else {"messages": USER}
    answer = ask(make_service(backend), **body, prompt_logprobs=1, max_tokens=1).json()
    found = (answer["choices"][0] if ask is complete else answer)["prompt_logprobs"]
    ids = backend.requests[0].prompt_ids
    assert found[0] is None and len(found) == len(ids)
    assert found[1] == {
        str(ids[1] + 1): {"logprob": -0.125, "rank": 1, "decoded_token": chr(ids[1] + 1)},
        str(ids[1]): {"logprob": score(ids[1], 1).logprob, "rank": 2, "decoded_token": chr(ids[1])},
    }
    assert answer["choices"][0]["logprobs"] is None


def test_both_numbers_of_likeliest_are_kept_apart() -> None:
    body: dict[str, Any] = {"prompt": "abc", "echo": True, "logprobs": 1, "prompt_logprobs": 3}
    choice = complete(make_service(ScriptedBackend("x")), **body).json()["choices"][0]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:]] == [2, 2, 2]
    assert [len(top) for top in choice["prompt_logprobs"][1:]] == [4, 4]


def test_a_backend_that_loses_a_score_is_an_internal_error() -> None:
    class Forgetful(ScriptedBackend):
        async def generate(self, request: GenerateRequest) -> Any:
            async for chunk in super().generate(request):
                if not chunk.prompt_logprobs or len(chunk.prompt_logprobs) == 3:
                    yield chunk

    service = make_service(Forgetful("x"))
    assert complete(service, prompt="abcd", echo=True, logprobs=0).status_code == 200
    assert complete(service, prompt="abcdef", echo=True, logprobs=0).status_code == 500


# best_of


def test_the_best_by_mean_log_probability_are_kept_in_order() -> None:
    said = {"0": b"zzzz", "1": b"a", "2": b"", "3": b"bb", "4": b"zz", "5": b"c"}

    def says(request: GenerateRequest) -> bytes:
        return said[request.request_id.rpartition("-")[2]]

    service = make_service(ScriptedBackend(says))
    answer = complete(service, prompt=["pq", "rst"], best_of=3, n=2).json()
    assert [choice["text"] for choice in answer["choices"]] == ["a", "zzzz", "bb", "c"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 10, "total_tokens": 15}
    echoed = complete(service, prompt=["pq", "rst"], best_of=3, n=1, echo=True, logprobs=1).json()
    assert [choice["text"] for choice in echoed["choices"]] == ["pqa", "rstbb"]
    assert [choice["logprobs"]["tokens"] for choice in echoed["choices"]] == [list("pqa"), list("rstbb")]
    assert mean_logprob([]) == float("-inf")


def test_best_of_counts_as_choices_and_equal_to_n_leaves_none_out() -> None:
    response = complete(make_service(ScriptedBackend()), prompt=["a"] * 2, best_of=65)
    assert error_of(response)["param"] == "best_of"
    backend = ScriptedBackend("x")
    assert len(complete(make_service(backend), prompt="a", best_of=2, n=2).json()["choices"]) == 2
    assert [request.logprobs for request in backend.requests] == [None, None]
    assert len({request.sampling.seed for request in backend.requests}) == 2


def test_the_official_client_reads_log_probabilities() -> None:
    async def talk() -> None:
        async with official(make_service(ScriptedBackend("hé"))) as ai:
            whole = await ai.chat.completions.create(model="m", messages=USER, logprobs=True, top_logprobs=2)
            content = whole.choices[0].logprobs.content
            assert bytes(b for entry in content for b in entry.bytes).decode() == "hé"
            assert [top.token for top in content[0].top_logprobs] == ["i", "j"]
            plain = await ai.completions.create(model="m", prompt="ab", logprobs=1, echo=True, max_tokens=1)
            assert plain.choices[0].logprobs.tokens == ["a", "b", "h"]
            assert plain.choices[0].logprobs.token_logprobs[0] is None
            async with ai.chat.completions.stream(model="m", messages=USER, logprobs=True) as helper:
                final = await helper.get_final_completion()
            assert len(final.choices[0].logprobs.content) == 3

    run(talk())


def test_an_end_token_has_no_entry() -> None:
    backend = ScriptedBackend("ab")
    choice = complete(make_service(backend), prompt="x", logprobs=0).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == ["a", "b"] and EOS in backend.requests[0].stop_token_ids
