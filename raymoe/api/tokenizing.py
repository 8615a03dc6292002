"""POST /tokenize and /detokenize, with vLLM's fields and answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from raymoe.api.fields import Neutral, parse_fields
from raymoe.api.messages import Message
from raymoe.api.sampling import check_ids
from raymoe.api.tokens import TokenMaker
from raymoe.errors import RequestError

TOKENIZE_NEUTRAL: Neutral = {
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "tools": ([],),
}


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    model: str | None = None


class TokenizeRequest(_Body):
    """A `prompt`, or `messages` for the chat template: exactly one of them."""

    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = None
    """What the tokenizer puts around a prompt. By default with a prompt; a template writes its own."""
    add_generation_prompt: bool = True
    """Open the assistant's turn; for messages."""
    return_token_strs: bool = False

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> TokenizeRequest:
        """Validate a body; raises RequestError with the field's path."""
        request = parse_fields(cls, body, TOKENIZE_NEUTRAL)
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("exactly one of prompt and messages must be given", "prompt")
        return request


class DetokenizeRequest(_Body):
    """Token ids, special ones too."""

    tokens: list[int]

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> DetokenizeRequest:
        """Validate a body; raises RequestError with the field's path."""
        return parse_fields(cls, body, {})


async def tokenize(maker: TokenMaker, request: TokenizeRequest, max_context: int) -> dict[str, Any]:
    """The answer to /tokenize. Raises RequestError as the chat template does."""
    special = request.add_special_tokens
    if request.messages is not None:
        ids = await maker.encode_chat(
            request.messages, opened=request.add_generation_prompt, special_tokens=bool(special)
        )
    else:
        ids = await maker.encode(request.prompt or "", special is None or special)
    strings = [maker.speller.text(token_id) for token_id in ids] if request.return_token_strs else None
    return {"count": len(ids), "max_model_len": max_context, "tokens": ids, "token_strs": strings}


async def detokenize(maker: TokenMaker, request: DetokenizeRequest, vocab_size: int) -> dict[str, Any]:
    """The answer to /detokenize. Raises VocabularyError for an id that there is not."""
    check_ids(request.tokens, vocab_size, "tokens")
    return {"prompt": await maker.decode(request.tokens)}
