"""/v1/responses: whole and streamed, read by the official client, refused by name, failing in the middle."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from raymoe.errors import ExpertUnavailableError
from tests.api.scripted import CONTEXT, ScriptedBackend, error_of, make_service, post, run
from tests.api.test_sse import official

PATH = "/v1/responses"


def typed_events(text: str) -> list[dict[str, Any]]:
    """Events of a stream, after checking names, numbers, and that nothing follows the last."""
    assert text.endswith("\n\n") and "[DONE]" not in text
    found = []
    for number, block in enumerate(text.removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        found.append(event)
    return found


def prompt_of(body: dict[str, Any]) -> str:
    backend = ScriptedBackend()
    response = post(make_service(backend), PATH, body)
    assert response.status_code == 200, response.text
    return bytes(backend.requests[0].prompt_ids).decode()


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"input": "é"}, "<user>é>"),
        ({"input": "x", "instructions": "be"}, "<system>be<user>x>"),
        (
            {"input": [{"role": "developer", "content": "d"}, {"role": "user", "content": ""}]},
            "<system>d<user>>",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]}]},
            "<user>ab>",
        ),
    ],
)
def test_the_input_is_a_chat(body: Any, prompt: str) -> None:
    assert prompt_of(body) == prompt


def test_an_earlier_answer_goes_back_in_as_it_came() -> None:
    service = make_service(ScriptedBackend("hi"))
    output = post(service, PATH, {"input": "x"}).json()["output"]
    turns = [{"role": "user", "content": "x"}, *output, {"type": "message", "role": "user", "content": "y"}]
    assert prompt_of({"input": turns}) == "<user>x<assistant>hi<user>y>"


def test_a_response_has_openais_shape_and_says_what_was_asked() -> None:
    body = {"input": "x", "instructions": "i", "metadata": {"k": "v"}, "temperature": 0, "user": "me"}
    answer = post(make_service(ScriptedBackend("héy")), PATH, body).json()
    assert answer["id"].startswith("resp_") and answer["object"] == "response"
    assert (answer["status"], answer["incomplete_details"], answer["error"]) == ("completed", None, None)
    assert (answer["instructions"], answer["metadata"], answer["user"]) == ("i", {"k": "v"}, "me")
    (message,) = answer["output"]
    assert (message["role"], message["status"]) == ("assistant", "completed")
    assert message["content"] == [{"type": "output_text", "text": "héy", "annotations": [], "logprobs": []}]
    assert (answer["usage"]["input_tokens"], answer["usage"]["output_tokens"]) == (17, 4)
    assert answer["usage"]["total_tokens"] == 21


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_response_is_incomplete(stream: bool) -> None:
    body = {"input": "x", "max_output_tokens": 2, "stream": stream}
    response = post(make_service(ScriptedBackend("hello")), PATH, body)
    if stream:
        last = typed_events(response.text)[-1]
        assert last["type"] == "response.incomplete"
    answer = last["response"] if stream else response.json()
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["content"][0]["text"] == "he"
    assert answer["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize("said", ["a😀", ""])
def test_a_stream_has_every_event_once_and_in_order(said: str) -> None:
    body = {"input": "x", "stream": True, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    events = typed_events(post(make_service(ScriptedBackend(said)), PATH, body).text)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    kinds = [event["type"] for event in events if event not in deltas]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event["delta"] for event in deltas] == list(said)
    assert [len(event["logprobs"]) for event in deltas] == [len(char.encode()) for char in said]
    final = events[-1]["response"]
    assert final["output"] == [events[-2]["item"]]
    assert final["output"][0]["content"][0]["text"] == said == events[-4]["text"]
    assert [one for event in deltas for one in event["logprobs"]] == events[-4]["logprobs"]
    assert final["usage"]["output_tokens"] == len(said.encode())
    assert len({event["item_id"] for event in events if "item_id" in event}) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "role": "user", "content": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        ({"input": "x", "store": True}, "store"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "include": ["file_search_call.results"]}, "include[0]"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format"),
        ({"input": "x", "text": {"format": {"type": "text", "name": "n"}}}, "text.format"),
        ({"input": "x", "text": {"verbosity": "low"}}, "text.verbosity"),
        (
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "q"}}}},
            "text",
        ),
        ({"input": "x", "truncation": "auto"}, "truncation"),
        ({"input": "x" * CONTEXT}, "input"),
        ({"input": [{"role": "assistant", "content": "x"}]}, "input"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_named(body: Any, param: str, stream: bool) -> None:
    backend = ScriptedBackend()
    response = post(make_service(backend), PATH, {**body, "stream": stream})
    assert (response.status_code, error_of(response)["param"]) == (400, param)
    assert backend.requests == []


@pytest.mark.parametrize(
    "form",
    [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "name": "n", "schema": {"const": "q"}, "strict": True},
    ],
)
def test_a_format_becomes_a_grammar_and_is_repeated(form: Any) -> None:
    backend = ScriptedBackend()
    answer = post(make_service(backend), PATH, {"input": "x", "text": {"format": form}}).json()
    assert answer["text"] == {"format": form}
    grammar = backend.requests[0].grammar
    assert (grammar is None) == (form["type"] == "text")
    assert form["type"] != "json_schema" or '"q"' in str(grammar)


def test_a_failure_in_the_middle_is_told_twice_and_ends_the_stream() -> None:
    service = make_service(ScriptedBackend(fail_at=2, error=ExpertUnavailableError(3, ("g1",))))
    *events, error, failed = typed_events(post(service, PATH, {"input": "x", "stream": True}).text)
    assert (error["type"], error["code"]) == ("error", "expert_unavailable")
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["message"] == error["message"]
    assert all(event["type"] != "response.completed" for event in events)
    assert 'outcome="failed",path="/v1/responses"} 1.0' in service.metrics.render().decode()
    service = make_service(ScriptedBackend(fail_at=0, error=ExpertUnavailableError(3, ("g1",))))
    assert post(service, PATH, {"input": "x", "stream": True}).status_code == 503


def test_the_official_client_understands_responses() -> None:
    async def talk() -> None:
        async with official(make_service(ScriptedBackend("héllo 😀"))) as ai:
            whole = await ai.responses.create(
                model="m",
                input="x",
                store=False,
                top_logprobs=1,
                include=["message.output_text.logprobs"],
            )
            assert whole.output_text == "héllo 😀" and whole.usage.output_tokens == 11
            assert len(whole.output[0].content[0].logprobs) == 11
            stream = await ai.responses.create(model="m", input="x", stream=True)
            events = [event async for event in stream]
            assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "héllo 😀"
            assert events[-1].response.output_text == "héllo 😀"
            async with ai.responses.stream(model="m", input=[{"role": "user", "content": "x"}]) as helper:
                async for _ in helper:
                    pass
                final = await helper.get_final_response()
            assert final.output_text == "héllo 😀"
            with pytest.raises(openai.BadRequestError) as bad:
                await ai.responses.create(model="m", input="x", previous_response_id="r")
            assert bad.value.param == "previous_response_id"

    run(talk())
