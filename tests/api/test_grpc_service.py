"""The gRPC methods over a real connection, in front of a backend that says what it is told."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from raymoe.errors import ExpertUnavailableError, OverloadedError
from raymoe.v1 import inference_pb2 as v1
from tests.api.grpc_server import ask, channel, chat, generate, method, refused, trailing
from tests.api.scripted import EOS, ScriptedBackend, byte_tokenizer, make_service, run
from tests.api.test_admission import guarded


def test_generate_answers_as_http_does() -> None:
    backend = ScriptedBackend("hello")
    answer = ask(make_service(backend), "Generate", generate(max_tokens=3, seed=1, n=2, stop=["q"]))
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
        (0, "hel", "length"),
        (1, "hel", "length"),
    ]
    assert answer.model == "m" and answer.id.startswith("cmpl-") and answer.created > 0
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        1,
        6,
        7,
    )
    assert [request.prompt_ids for request in backend.requests] == [(120,)] * 2


def test_zeros_and_ids_arrive_and_what_is_absent_has_its_default() -> None:
    backend = ScriptedBackend()
    body = {
        "prompt": [[1, 2], [3]],
        "temperature": 0,
        "logit_bias": {"5": -1.5},
        "stop_token_ids": [7],
        "min_p": 0.25,
    }
    ask(make_service(backend), "Generate", generate(**body))
    first, second = sorted(backend.requests, key=lambda r: r.prompt_ids)
    assert (first.prompt_ids, second.prompt_ids) == ((1, 2), (3,))
    assert first.max_tokens == 16 and first.stop_token_ids == (EOS, 7)
    sampling = first.sampling
    assert (sampling.temperature, sampling.logit_bias, sampling.min_p) == (0, ((5, -1.5),), 0.25)
    assert (sampling.top_p, sampling.presence_penalty) == (1, 0)


def test_a_stream_has_the_same_text_in_pieces_then_the_usage() -> None:
    service = make_service(ScriptedBackend("héllo"))
    pieces = ask(service, "GenerateStream", generate(max_tokens=20, n=2))
    for index in (0, 1):
        own = [c for piece in pieces for c in piece.choices if c.index == index]
        assert "".join(c.text for c in own) == "héllo"
        assert [c.finish_reason for c in own if c.finish_reason] == ["stop"] and own[
            -1
        ].finish_reason == "stop"
    assert len({piece.id for piece in pieces}) == 1
    assert [piece.HasField("usage") for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert not pieces[-1].choices and pieces[-1].usage.completion_tokens == 12


def test_chat_renders_the_template_and_answers_whole_and_in_pieces() -> None:
    backend = ScriptedBackend("yes")
    service = make_service(backend)
    answer = ask(service, "Chat", chat(max_tokens=9))
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "yes", "stop")
    pieces = ask(service, "ChatStream", chat(max_tokens=9))
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(c.delta.content for piece in pieces for c in piece.choices) == "yes"
    assert pieces[-2].choices[0].finish_reason == "stop" and pieces[-1].usage.completion_tokens == 3
    assert {bytes(request.prompt_ids) for request in backend.requests} == {b"<user>hi>"}


def test_history_with_tool_calls_reaches_the_template() -> None:
    backend = ScriptedBackend()
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "r", "tool_call_id": "1"},
    ]
    ask(make_service(backend), "Chat", chat(messages=messages, max_tokens=1))
    assert bytes(backend.requests[0].prompt_ids) == b'<user>q<assistant>[f {"a": 1}]<tool>r>'


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("request_", "code", "name", "param"),
    [
        (generate(model="nope"), "NOT_FOUND", "model_not_found", "model"),
        (generate(model=""), "NOT_FOUND", "model_not_found", "model"),
        (generate(prompt=""), "INVALID_ARGUMENT", "invalid_request", "prompt"),
        (generate(prompt=[]), "INVALID_ARGUMENT", "invalid_request", "prompt"),
        (generate(prompt=[[]]), "INVALID_ARGUMENT", "invalid_request", "prompt"),
        (v1.GenerateRequest(prompt=[v1.Prompt()]), "INVALID_ARGUMENT", "invalid_request", "prompt"),
        (generate(prompt=["x", [1]]), "INVALID_ARGUMENT", "invalid_request", "prompt"),
        (generate(prompt="x" * 64), "INVALID_ARGUMENT", "context_length_exceeded", "prompt"),
        (generate(prompt=[5, 999]), "INVALID_ARGUMENT", "token_out_of_vocabulary", "prompt"),
        (generate(temperature=2.5), "INVALID_ARGUMENT", "invalid_request", "temperature"),
        (generate(temperature=float("nan")), "INVALID_ARGUMENT", "invalid_request", "temperature"),
        (generate(max_tokens=0), "INVALID_ARGUMENT", "invalid_request", "max_tokens"),
        (generate(stop=[""]), "INVALID_ARGUMENT", "invalid_request", "stop"),
        (generate(logit_bias={"-5": 1.0}), "INVALID_ARGUMENT", "invalid_request", "logit_bias"),
        (b"\x12\x03\x0a\x01\xff", "INVALID_ARGUMENT", "invalid_request", None),
        (b"\xff", "INVALID_ARGUMENT", "invalid_request", None),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_before_the_backend(
    request_: Message | bytes, code: str, name: str, param: str | None, stream: bool
) -> None:
    backend = ScriptedBackend()
    error = refused(make_service(backend), "GenerateStream" if stream else "Generate", request_)
    assert error.code().name == code and error.details()
    assert trailing(error).get("raymoe-code") == name
    assert trailing(error).get("raymoe-param") == param
    assert backend.requests == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (b"\xf8\x07\x01", "raymoe.v1.GenerateRequest has no field 127"),
        (b"\x1a\x03\xf8\x07\x01", "raymoe.v1.Sampling has no field 127"),
        (b"\x12\x05\x12\x03\xf8\x07\x01", "raymoe.v1.TokenIds has no field 127"),
    ],
)
def test_unknown_fields_are_refused_by_number_at_any_depth(more: bytes, message: str) -> None:
    backend = ScriptedBackend()
    error = refused(make_service(backend), "Generate", generate().SerializeToString() + more)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and message in error.details()
    assert backend.requests == []


@pytest.mark.parametrize("name", ["Chat", "ChatStream"])
def test_chats_are_checked_as_over_http(name: str) -> None:
    service = make_service(ScriptedBackend())
    for messages, param in (([], "messages"), ([{"role": "king", "content": "x"}], "messages[0].role")):
        error = refused(service, name, chat(messages=messages))
        assert trailing(error)["raymoe-param"] == param
    error = refused(make_service(ScriptedBackend(), tokenizer=byte_tokenizer(template=None)), name, chat())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "chat template" in error.details()


def test_a_message_beyond_the_limit_is_refused() -> None:
    from raymoe.api.service import Limits

    service = make_service(ScriptedBackend(), limits=Limits(body_bytes=2000))
    error = refused(service, "Generate", generate(prompt="x" * 2000))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (
        "server.max_body_bytes" in error.details() and trailing(error)["raymoe-code"] == "request_too_large"
    )


@pytest.mark.parametrize(
    ("error", "code", "retry"),
    [
        (OverloadedError("full", 7), "RESOURCE_EXHAUSTED", "7"),
        (ExpertUnavailableError(3, ("g0",)), "UNAVAILABLE", None),
        (KeyError("secret detail"), "INTERNAL", None),
    ],
)
@pytest.mark.parametrize(("name", "fail_at"), [("Generate", 2), ("GenerateStream", 0), ("GenerateStream", 2)])
def test_failures_have_the_status_of_the_one_table(
    error: Exception, code: str, retry: str | None, name: str, fail_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    said = refused(make_service(ScriptedBackend(fail_at=fail_at, error=error)), name, generate())
    assert said.code().name == code and trailing(said).get("retry-after") == retry
    if code == "INTERNAL":
        assert "secret" not in said.details() and "secret detail" in caplog.text
        assert trailing(said)["x-request-id"] in said.details()
    else:
        assert said.details() == str(error) and caplog.text == ""


def test_what_came_before_a_failure_arrives_and_the_last_message_is_empty() -> None:
    async def broken() -> None:
        async with channel(make_service(ScriptedBackend("abcdef", fail_at=3))) as opened:
            call = method(opened, "GenerateStream")(generate())
            pieces = await _until_error(call)
            assert "".join(c.text for piece in pieces for c in piece.choices) == "abc"
            assert not any(c.finish_reason for piece in pieces for c in piece.choices)
            assert pieces[-1] == v1.GenerateResponse()
            assert await call.code() is grpc.StatusCode.INTERNAL

    run(broken())


async def _until_error(call: Any) -> list[Any]:
    """The messages of a stream that fails."""
    messages = []
    try:
        async for message in call:
            messages.append(message)
    except grpc.aio.AioRpcError:
        return messages
    raise AssertionError("the stream ended well")


@pytest.mark.parametrize("name", ["Generate", "GenerateStream", "ChatStream"])
@pytest.mark.parametrize("leave", ["cancel", "deadline"])
def test_a_client_that_leaves_or_whose_deadline_passes_stops_its_sequences(name: str, leave: str) -> None:
    backend = ScriptedBackend("abcdef", sleep_at=2)
    service = make_service(backend)
    request = chat(n=2) if name == "ChatStream" else generate(n=2)

    async def left() -> None:
        async with channel(service) as opened:
            call = method(opened, name)(request, timeout=2 if leave == "deadline" else None)
            reader = asyncio.ensure_future(_read(call))
            await backend.sleeping.wait()
            if leave == "cancel":
                call.cancel()
            with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
                await reader
            wanted = grpc.StatusCode.CANCELLED if leave == "cancel" else grpc.StatusCode.DEADLINE_EXCEEDED
            assert await call.code() is wanted
            while backend.active:
                await asyncio.sleep(0.01)

    run(left())
    assert len(backend.closed_early) == 2
    counted = service.metrics.render().decode()
    assert f'raymoe_grpc_requests_total{{code="CANCELLED",method="{name}"}} 1.0' in counted
    assert "raymoe_grpc_requests_in_flight 0.0" in counted


async def _read(call: Any) -> None:
    if hasattr(call, "__aiter__"):
        async for _ in call:
            pass
    else:
        await call


def test_calls_are_counted_by_method_and_status() -> None:
    service = make_service(ScriptedBackend())
    ask(service, "ChatStream", chat())
    refused(service, "Generate", generate(model="nope"))
    counted = service.metrics.render().decode()
    assert 'raymoe_grpc_requests_total{code="OK",method="ChatStream"} 1.0' in counted
    assert 'raymoe_grpc_requests_total{code="NOT_FOUND",method="Generate"} 1.0' in counted
    assert 'raymoe_grpc_request_seconds_count{method="Generate"} 1.0' in counted


def test_the_clients_request_id_comes_back_and_is_only_a_label() -> None:
    backend = ScriptedBackend(lambda request: list(request.prompt_ids) * 3)
    service = make_service(backend)

    async def twice() -> None:
        async with channel(service) as opened:
            calls = [
                method(opened, "Generate")(generate(prompt=prompt), metadata=[("x-request-id", "same")])
                for prompt in "ab"
            ]
            answers = await asyncio.gather(*calls)
            assert [answer.choices[0].text for answer in answers] == ["aaa", "bbb"]
            assert [dict(await call.trailing_metadata())["x-request-id"] for call in calls] == ["same"] * 2

    run(twice())
    assert len({request.request_id for request in backend.requests}) == 2
    error = refused(service, "Generate", generate(model="nope"), metadata=[("x-request-id", "i" * 1000)])
    assert trailing(error)["x-request-id"] == "i" * 128


def test_models_and_layout() -> None:
    service = make_service(ScriptedBackend())
    (model,) = ask(service, "ListModels", v1.ListModelsRequest()).data
    assert (model.id, model.owned_by) == ("m", "raymoe")
    layout = ask(service, "GetLayout", v1.GetLayoutRequest())
    assert (layout.epoch, [(group.name, group.lane) for group in layout.groups]) == (
        7,
        [("a", "shm"), ("b", "shm")],
    )
    experts = [[(c.group, c.slot) for c in expert.copies] for expert in layout.layers[0].experts]
    assert experts == [[(0, 0)], [(1, 0), (0, 1)]]
    # Who knows an address may connect to it.
    assert b"secret" not in layout.SerializeToString()


def test_without_a_layout_or_a_router_the_status_says_so() -> None:
    backend = ScriptedBackend()
    backend.reason = "no router is ready"
    error = refused(make_service(backend), "ListModels", v1.ListModelsRequest())
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "no router is ready")

    async def without() -> None:
        async with channel(make_service(ScriptedBackend()), layout=None) as opened:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(opened, "GetLayout")(v1.GetLayoutRequest())
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    run(without())


def test_every_method_of_the_service_is_there() -> None:
    from raymoe.api.grpc_methods import INFERENCE, METHODS
    from tests.api.grpc_server import Methods

    service = Methods(make_service(ScriptedBackend())).grpc
    assert {method.name for method in INFERENCE.methods} <= set(METHODS)
    assert {name for name, method in METHODS.items() if method.streams} == set(service._streams)
    assert {name for name, method in METHODS.items() if not method.streams} == set(service._unary)


def test_keys_and_limits_are_those_of_the_http_interface() -> None:
    backend = ScriptedBackend()
    service = guarded(backend, requests_per_minute=2)
    for metadata in ([], [("authorization", "Bearer wrong")], [("authorization", "Bearer key-a")] * 2):
        for name in ("Generate", "GenerateStream", "GetLayout"):
            request = generate() if name.startswith("Generate") else v1.GetLayoutRequest()
            error = refused(service, name, request, metadata=metadata)
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
            assert trailing(error)["raymoe-code"] == "invalid_api_key"
    assert backend.requests == []
    key = [("authorization", "Bearer key-a")]
    ask(service, "Generate", generate(), metadata=key)
    ask(service, "GetLayout", v1.GetLayoutRequest(), metadata=key)
    ask(service, "ChatStream", chat(n=2), metadata=key)
    assert {request.client for request in backend.requests} == {"alice"}
    error = refused(service, "GenerateStream", generate(), metadata=key)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert trailing(error)["raymoe-code"] == "rate_limit_exceeded" and int(trailing(error)["retry-after"]) > 0
    ask(service, "Generate", generate(), metadata=[("authorization", "Bearer key-b")])


def test_an_answer_tells_what_is_left_of_the_limits() -> None:
    async def told() -> None:
        async with channel(guarded(requests_per_minute=5)) as opened:
            call = method(opened, "Generate")(generate(), metadata=[("authorization", "Bearer key-a")])
            await call
            found = dict(await call.trailing_metadata())
            assert (
                found["x-ratelimit-limit-requests"] == "5" and found["x-ratelimit-remaining-requests"] == "4"
            )

    run(told())


def test_a_call_counts_until_it_has_ended() -> None:
    backend = ScriptedBackend(sleep_at=1)
    service = guarded(backend, concurrent_requests=1)
    key = [("authorization", "Bearer key-a")]

    async def both() -> None:
        async with channel(service) as opened:
            first = method(opened, "GenerateStream")(generate(), metadata=key)
            await backend.sleeping.wait()
            with pytest.raises(grpc.aio.AioRpcError, match="at once"):
                await method(opened, "Chat")(chat(), metadata=key)
            first.cancel()
            while backend.active:
                await asyncio.sleep(0.01)
            backend.sleeping.clear()
            again = method(opened, "GenerateStream")(generate(), metadata=key)
            await backend.sleeping.wait()
            again.cancel()

    run(both())
