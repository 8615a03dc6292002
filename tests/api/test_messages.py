"""Chat messages: all forms that mean the same render the same, and nothing prints None."""

from __future__ import annotations

from typing import Any

import pytest

from raymoe.api.requests import ChatRequest
from raymoe.errors import RequestError

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "42"}


def rendered(*messages: Any) -> list[dict[str, Any]]:
    return [message.to_template() for message in ChatRequest.parse({"messages": list(messages)}).messages]


def refusal(*messages: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        ChatRequest.parse({"messages": list(messages)})
    return caught.value


def test_a_string_and_a_list_of_text_parts_are_the_same() -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    assert rendered({"role": "user", "content": parts}) == rendered({"role": "user", "content": "hello"})


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}, {"content": []}])
def test_an_assistant_turn_with_tool_calls_needs_no_content(content: dict[str, Any]) -> None:
    assistant = {"role": "assistant", **content, "tool_calls": [CALL]}
    turn, tool = rendered(assistant, TOOL)
    assert turn["content"] == ""
    assert turn["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert tool == {"role": "tool", "content": "42", "tool_call_id": "c1"}


def test_arguments_that_are_no_object_stay_text() -> None:
    call = {**CALL, "function": {"name": "f", "arguments": "not json"}}
    assert rendered({"role": "assistant", "tool_calls": [call]})[0]["tool_calls"][0]["function"] == {
        "name": "f",
        "arguments": "not json",
    }


def test_an_answer_of_ours_can_be_sent_back_as_history() -> None:
    answer = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    assert rendered(answer) == [{"role": "assistant", "content": "hi"}]


def test_developer_is_the_newer_name_of_system() -> None:
    assert rendered({"role": "developer", "content": "x"}) == [{"role": "system", "content": "x"}]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("text", "messages[0]"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0]"),
        ({"role": "user", "content": None}, "messages[0]"),
        ({"role": "assistant", "content": None}, "messages[0]"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]}, "messages[0].content"),
        ({"role": "user", "content": "x", "refusal": "no"}, "messages[0].refusal"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages[0]"),
        ({"role": "tool", "content": "x"}, "messages[0]"),
        ({"role": "user", "content": "x", "tool_call_id": "c"}, "messages[0]"),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, "messages[0].tool_calls[0].function"),
    ],
)
def test_a_wrong_message_is_refused_with_its_path(message: Any, param: str) -> None:
    assert refusal(message).param == param


def test_no_messages_are_refused() -> None:
    assert refusal().param == "messages"
    with pytest.raises(RequestError) as caught:
        ChatRequest.parse({})
    assert caught.value.param == "messages"
