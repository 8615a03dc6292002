"""The service behind every protocol: validates a request whole, then hands its sequences to the backend."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from raymoe.api.admission import Admission
from raymoe.api.backend import Backend
from raymoe.api.callers import CallersBackend
from raymoe.api.generation import Choice, Generation, Wants
from raymoe.api.hygiene import Hygiene
from raymoe.api.reader import Echo
from raymoe.api.requests import ChatRequest, CompletionRequest, Prompt, SamplingBody
from raymoe.api.sampling import check_ids, end_ids, sampling_params
from raymoe.api.tokenizing import DetokenizeRequest, TokenizeRequest, detokenize, tokenize
from raymoe.api.tokens import TokenMaker, find_eos_ids
from raymoe.config import Settings
from raymoe.engine.messages import GenerateRequest
from raymoe.errors import (
    CheckpointError,
    ContextLengthError,
    ModelNotFoundError,
    NotReadyError,
    RaymoeError,
    RequestError,
)
from raymoe.observe.metrics import ApiMetrics

logger = logging.getLogger(__name__)

_CONTEXT_IDS = 6
"""Prompt tokens that a completion's text is decoded behind: spaces and bytes look to their left."""
_COMPLETION_TOKENS = 16
"""OpenAI's default of max_tokens for /v1/completions."""
_READINESS_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Limits:
    """What one request may ask for. `choices` counts prompts times `n`."""

    choices: int = 128
    body_bytes: int = 8 << 20
    body_timeout_s: float = 60.0
    prompt_tokens: int | None = None
    request_timeout_s: float = 600.0


class Service:
    """Tokenizer, model facts and backend. Whatever is wrong with a request is refused before the backend."""

    def __init__(
        self,
        backend: Backend,
        tokenizer: PreTrainedTokenizerBase,
        *,
        model_name: str,
        max_context: int,
        vocab_size: int,
        eos_ids: Sequence[int],
        kv_tokens: int | None = None,
        limits: Limits | None = None,
        admission: Admission | None = None,
        clean: bool = False,
    ) -> None:
        """
        Args:
            max_context: tokens of prompt and completion together.
            eos_ids: end a sequence, and are not part of its text.
            kv_tokens: tokens that fit the KV cache of one router, if that is known.
            admission: whom the protocols let in; by default everybody.
            clean: whether prompts are normalised.
        """
        self.metrics, self.admission = ApiMetrics(model_name), admission or Admission()
        hygiene = Hygiene(self.metrics.normalised.inc) if clean else None
        self._backend, self._tokens = CallersBackend(backend), TokenMaker(tokenizer, hygiene)
        self.model_name, self._created = model_name, int(time.time())
        self._max_context, self._vocab_size, self._kv_tokens = max_context, vocab_size, kv_tokens
        self._eos_ids = tuple(sorted(set(eos_ids)))
        self.limits = limits or Limits()

    @classmethod
    def from_checkpoint(
        cls, path: str | os.PathLike[str], backend: Backend, settings: Settings, kv_tokens: int | None = None
    ) -> Service:
        """Read tokenizer, chat template and model facts from a Hugging Face folder.

        Raises:
            CheckpointError: the folder lacks a config, a usable tokenizer or a context length.
            ConfigError: there is something wrong with the API keys.
        """
        try:
            config = AutoConfig.from_pretrained(path)
            tokenizer = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{os.fspath(path)}: {error}") from error
        text = config.get_text_config(decoder=True)
        max_context = settings.model.max_context or getattr(text, "max_position_embeddings", None)
        if max_context is None:
            raise CheckpointError(
                f"{os.fspath(path)}: config.json names no max_position_embeddings; set model.max_context"
            )
        return cls(
            backend,
            tokenizer,
            model_name=settings.model.name or os.path.basename(os.path.abspath(path)),
            max_context=max_context,
            vocab_size=text.vocab_size,
            eos_ids=find_eos_ids(path, text.eos_token_id, tokenizer.eos_token_id),
            kv_tokens=kv_tokens,
            limits=Limits(
                body_bytes=settings.server.max_body_bytes,
                body_timeout_s=settings.server.body_timeout_s,
                prompt_tokens=settings.server.max_prompt_tokens,
                request_timeout_s=settings.server.request_timeout_s,
            ),
            admission=Admission.of(settings),
            clean=settings.server.normalise_text,
        )

    async def complete(self, request: CompletionRequest) -> Generation:
        """Accept a completion request: `n` choices for each prompt, in order of the prompts.

        Raises:
            RequestError: names the field; ModelNotFoundError, ContextLengthError, VocabularyError likewise.
        """
        self.check_model(request.model)
        self._check_choices(request, len(request.prompt))
        prompts = []
        for prompt in request.prompt:
            ids = await self._prompt_ids(prompt)
            budget = self._budget(len(ids), request.max_tokens, _COMPLETION_TOKENS, "prompt")
            echo = Echo(prompt if isinstance(prompt, str) else None) if request.echo else None
            prompts.append(_Prompt(ids, budget, continues=True, echo=echo))
        scores = request.prompt_logprobs
        if request.echo and request.logprobs is not None:
            scores = max(request.logprobs, scores or 0)
        return self._generation(request, prompts, scores)

    async def chat(self, request: ChatRequest) -> Generation:
        """Accept a chat request; raises as `complete` does."""
        self.check_model(request.model)
        self._check_choices(request, 1)
        ids = await self._tokens.encode_chat(request.messages)
        if not ids:
            raise RequestError("the messages render to an empty prompt", "messages")
        budget = self._budget(len(ids), request.token_limit, None, "messages")
        return self._generation(request, [_Prompt(ids, budget)], request.prompt_logprobs)

    async def tokenize(self, request: TokenizeRequest) -> dict[str, Any]:
        """Token ids, as /tokenize answers; raises as `chat` does."""
        self.check_model(request.model)
        return await tokenize(self._tokens, request, self._max_context)

    async def detokenize(self, request: DetokenizeRequest) -> dict[str, Any]:
        """Their text, as /detokenize answers; raises ModelNotFoundError and VocabularyError."""
        self.check_model(request.model)
        return await detokenize(self._tokens, request, self._vocab_size)

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served; None means the one that is."""
        self.metrics.asked_for(name)
        if name is not None and name != self.model_name:
            raise ModelNotFoundError(f"this model is not served here; served: {self.model_name}", "model")

    def model_card(self) -> dict[str, str | int]:
        """The served model as OpenAI describes one."""
        return {
            "id": self.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "raymoe",
        }

    async def check_ready(self) -> None:
        """Raise NotReadyError with the reason unless requests can be answered."""
        try:
            async with asyncio.timeout(_READINESS_TIMEOUT_S):
                reason = await self._backend.readiness()
        except TimeoutError:
            reason = f"the readiness check did not answer within {_READINESS_TIMEOUT_S:g} s"
        except RaymoeError as error:
            logger.warning("the readiness check failed", exc_info=error)
            reason = "the readiness check failed"
        if reason is not None:
            raise NotReadyError(reason)

    async def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            prompt = await self._tokens.encode(prompt)
        else:
            check_ids(prompt, self._vocab_size, "prompt")
        if not prompt:
            raise RequestError("the prompt is empty", "prompt")
        return prompt

    def _check_choices(self, request: SamplingBody, prompts: int) -> None:
        count = request.candidates
        if prompts * count > self.limits.choices:
            field = "best_of" if count > request.n else "n"
            raise RequestError(
                f"{prompts} prompts with {field} {count} are {prompts * count} choices;"
                f" at most {self.limits.choices} are accepted",
                field if count > 1 else "prompt",
            )

    def _budget(self, prompt: int, wanted: int | None, default: int | None, field: str) -> int:
        limit, what = self._max_context, "the model's context"
        if self._kv_tokens is not None and self._kv_tokens < limit:
            limit, what = self._kv_tokens, "the server's KV cache"
        most = self.limits.prompt_tokens
        if most is not None and prompt > most:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens; at most {most} are accepted (server.max_prompt_tokens)",
                field,
            )
        room = limit - prompt
        if room < (0 if wanted == 0 else 1):
            raise ContextLengthError(
                f"the prompt has {prompt} tokens, which leaves no room in {what} of {limit} tokens", field
            )
        if wanted is None:
            return room if default is None else min(room, default)
        if wanted > room:
            raise ContextLengthError(
                f"{prompt} prompt tokens and {wanted} to generate are more than {what} of {limit} tokens",
                field,
            )
        return wanted

    def _generation(
        self, request: SamplingBody, prompts: list[_Prompt], prompt_logprobs: int | None
    ) -> Generation:
        choices: list[Choice] = []
        count, logprobs, best = request.candidates, request.wanted_logprobs, None
        if count > request.n:
            best, logprobs = (count, request.n), logprobs or 0
        # Internal ids are our own: two clients may well send the same X-Request-Id.
        request_id = uuid.uuid4().hex
        grammar = request.grammar()
        for prompt in prompts:
            for sampling in sampling_params(request, self._vocab_size, self._eos_ids, prompt.budget, count):
                sequence = GenerateRequest(
                    request_id=f"{request_id}-{len(choices)}",
                    prompt_ids=tuple(prompt.ids),
                    max_tokens=prompt.budget,
                    sampling=sampling,
                    stop_token_ids=end_ids(request, self._eos_ids),
                    deadline_s=self.limits.request_timeout_s,
                    logprobs=logprobs,
                    prompt_logprobs=prompt_logprobs,
                    grammar=grammar,
                )
                context_ids = tuple(prompt.ids[-_CONTEXT_IDS:]) if prompt.continues else ()
                choices.append(Choice(sequence, context_ids, prompt.echo))
        return Generation(
            self._backend,
            self._tokens.decoder,
            self._tokens.speller,
            choices,
            request.stop,
            sum(len(prompt.ids) for prompt in prompts),
            self.metrics,
            wants=Wants(request.wanted_logprobs, request.prompt_logprobs),
            best=best,
        )


@dataclass(frozen=True)
class _Prompt:
    """One prompt of a request, how many tokens may follow, and what its text has to do with it."""

    ids: list[int]
    budget: int
    continues: bool = False
    echo: Echo | None = None
