"""A byte tokenizer, a backend that says what it is told, and ways to call the application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from raymoe.api.http import create_app
from raymoe.api.service import Service
from raymoe.engine.messages import GenerateChunk, GenerateRequest, TokenLogprob

BOS, EOS = 256, 257
VOCAB = 260
CONTEXT = 64
TEMPLATE = (
    "{% for m in messages %}{% if loop.first and m.role == 'assistant' %}"
    "{{ raise_exception('first turn must not be the assistant') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level tokenizers."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def byte_tokenizer(*, bos: bool = False, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a byte: id = byte. Ids 256.. are `<bos> <eos> <eot> <pad>`."""
    backend = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(byte_alphabet())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<bos>", "<eos>", "<eot>", "<pad>"])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", BOS)]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>")
    tokenizer.chat_template = template
    return tokenizer


def score(token: int, top: int) -> TokenLogprob:
    """What the scripted backend says of a token: the likeliest are the ones behind it, it is one of the last."""
    likeliest = tuple(((token + n) % VOCAB, -0.125 * n) for n in range(1, top + 1))
    return TokenLogprob(-1.0 - token / 1024, top + 1, likeliest)


class ScriptedBackend:
    """Emits the bytes of `says(request)` one a chunk, cut at max_tokens; the last token is EOS unless cut."""

    def __init__(
        self,
        says: str | bytes | Callable[[GenerateRequest], Sequence[int]] = "hello",
        *,
        sizes: Sequence[int] = (1,),
        fail_at: int | None = None,
        error: Exception | None = None,
        sleep_at: int | None = None,
        ends: bool = True,
    ) -> None:
        self._says = says.encode() if isinstance(says, str) else says
        self._sizes, self._fail_at, self._error = sizes, fail_at, error
        self._sleep_at, self._ends = sleep_at, ends
        self.requests: list[GenerateRequest] = []
        self.active: set[str] = set()
        self.closed_early: list[str] = []
        self.sleeping = asyncio.Event()
        self.wake = asyncio.Event()
        self.reason: str | None = None

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        self.requests.append(request)
        self.active.add(request.request_id)
        finished = False
        try:
            said = self._says(request) if callable(self._says) else self._says
            tokens, sent, turn = list(said[: request.max_tokens]), 0, 0
            if request.prompt_logprobs is not None:
                yield GenerateChunk(())
                scores = [score(token, request.prompt_logprobs) for token in request.prompt_ids[1:]]
                for start in range(request.prompt_scored, len(scores), 3):
                    yield GenerateChunk((), prompt_logprobs=tuple(scores[start : start + 3]))
            while sent < len(tokens):
                if self._fail_at is not None and sent >= self._fail_at:
                    raise self._error or RuntimeError("secret detail")
                if self._sleep_at is not None and sent >= self._sleep_at:
                    self.sleeping.set()
                    await asyncio.wait_for(self.wake.wait(), 3600)
                await asyncio.sleep(0)
                size = self._sizes[turn % len(self._sizes)]
                new = tuple(tokens[sent : sent + size])
                asked = request.logprobs
                yield GenerateChunk(
                    new, None, tuple(score(t, asked) for t in new) if asked is not None else ()
                )
                sent, turn = sent + size, turn + 1
            finished = True
            if self._ends:
                yield GenerateChunk((), "length" if len(said) >= request.max_tokens else "stop")
        finally:
            self.active.discard(request.request_id)
            if not finished:
                self.closed_early.append(request.request_id)

    async def readiness(self) -> str | None:
        return self.reason


def make_service(backend: ScriptedBackend, *, tokenizer: Any = None, **options: Any) -> Service:
    options = {"model_name": "m", "max_context": CONTEXT, "vocab_size": VOCAB, "eos_ids": [EOS], **options}
    return Service(backend, tokenizer or byte_tokenizer(), **options)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine with a deadline."""

    async def limited() -> Any:
        async with asyncio.timeout(30):
            return await work

    return asyncio.run(limited())


@asynccontextmanager
async def client(service: Service) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield http


def call(service: Service, method: str, path: str, **options: Any) -> httpx.Response:
    """One request to a new application around the service."""

    async def one() -> httpx.Response:
        async with client(service) as http:
            return await http.request(method, path, **options)

    return run(one())


def post(service: Service, path: str, body: Any, **options: Any) -> httpx.Response:
    return call(service, "POST", path, json=body, **options)


def complete(service: Service, **body: Any) -> httpx.Response:
    return post(service, "/v1/completions", body)


def chat(service: Service, **body: Any) -> httpx.Response:
    return post(service, "/v1/chat/completions", body)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a response, after checking the envelope's shape."""
    body = response.json()
    assert set(body) == {"error"}, body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert len(response.content) < 4096
    return body["error"]


def events(text: str) -> list[dict[str, Any]]:
    """Events of a stream, after checking that `[DONE]` comes once and last."""
    frames = text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    assert text.count("[DONE]") == 1
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


class RawClient:
    """Calls the application as an ASGI server would, so that it can disconnect at a chosen moment."""

    def __init__(self, service: Service, path: str, body: Any) -> None:
        self._app, self._path = create_app(service), path
        self._body = json.dumps(body).encode()
        self._sent_body = False
        self._gone = asyncio.Event()
        self.messages: list[dict[str, Any]] = []
        self.frames = asyncio.Semaphore(0)

    async def call(self) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "path": self._path,
            "raw_path": self._path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"content-type", b"application/json")],
            "server": ("test", 80),
            "client": ("test", 1),
        }
        await self._app(scope, self._receive, self._send)

    def leave(self) -> None:
        self._gone.set()

    async def _receive(self) -> dict[str, Any]:
        if not self._sent_body:
            self._sent_body = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if self._gone.is_set():
            raise OSError("connection closed")
        self.messages.append(message)
        self.frames.release()
