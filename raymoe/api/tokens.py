"""From texts and chat messages to token ids, by the checkpoint's own tokenizer and chat template."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence

import jinja2
from transformers import GenerationConfig, PreTrainedTokenizerBase

from raymoe.api.hygiene import Hygiene
from raymoe.api.messages import Message
from raymoe.api.spelling import Speller
from raymoe.api.text import Decoder
from raymoe.errors import CheckpointError, RequestError

logger = logging.getLogger(__name__)

_LONG_TEXT = 20_000
"""Characters from which tokenizing leaves the event loop for a thread."""


class TokenMaker:
    """Tokenizer and chat template of one model."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, hygiene: Hygiene | None = None) -> None:
        """`hygiene` normalises what clients send.

        Raises:
            CheckpointError: the tokenizer has no `tokenizers` backend, which incremental decoding needs.
        """
        self._tokenizer, self._hygiene = tokenizer, hygiene
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise CheckpointError(f"tokenizer {type(tokenizer).__name__} has no tokenizer.json form")
        # A tokenizer.json may ask for truncation, which would cut prompts in silence.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.speller = Speller(backend)
        self._template = self._find_template()
        if self._template is None:
            logger.warning("this model has no chat template: /v1/chat/completions is refused")

    @property
    def decoder(self) -> Decoder:
        """What `TextDecoder` decodes with."""
        return self._backend

    async def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Token ids of a text; `special_tokens` adds what the tokenizer puts around a prompt, such as BOS."""
        if self._hygiene is not None:
            text = self._hygiene.clean(text)
        return await self._tokenize(text, special_tokens)

    async def _tokenize(self, text: str, special_tokens: bool) -> list[int]:
        if len(text) < _LONG_TEXT:
            return self._encode(text, special_tokens)
        return await asyncio.to_thread(self._encode, text, special_tokens)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, special ones too."""
        return await asyncio.to_thread(self._backend.decode, token_ids, skip_special_tokens=False)

    async def encode_chat(
        self, messages: Sequence[Message], *, opened: bool = True, special_tokens: bool = False
    ) -> list[int]:
        """Render the chat template, with an opened assistant turn if `opened`, and tokenize that.

        The template writes its own special tokens; `special_tokens` adds the tokenizer's nevertheless.

        Raises:
            RequestError: there is no template, or the template refuses the messages (with its own text).
        """
        if self._template is None:
            raise RequestError("this model has no chat template; use /v1/completions", "messages")
        try:
            turns = [message.to_template() for message in messages]
            # Before rendering: the template's own text may hold anything, such as special tokens.
            text = self._tokenizer.apply_chat_template(
                turns if self._hygiene is None else self._hygiene.clean(turns),
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=opened,
            )
        except jinja2.TemplateError as error:
            raise RequestError(f"the model's chat template refuses: {str(error)[:500]}", "messages") from None
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            logger.warning("the chat template failed on a request", exc_info=error)
            raise RequestError("the model's chat template can't render these messages", "messages") from None
        return await self._tokenize(text, special_tokens)

    def _encode(self, text: str, special_tokens: bool) -> list[int]:
        # `encode` holds the interpreter's lock from start to end, `encode_batch` lets other threads run.
        (encoding,) = self._backend.encode_batch([text], add_special_tokens=special_tokens)
        return list(encoding.ids)

    def _find_template(self) -> str | None:
        try:
            return str(self._tokenizer.get_chat_template())
        except ValueError:
            return None


def find_eos_ids(path: str | os.PathLike[str], of_config: object, of_tokenizer: object) -> list[int]:
    """As `generate()` chooses them: generation_config.json, else config.json, else the tokenizer's."""
    generation: object = None
    if os.path.isfile(os.path.join(path, "generation_config.json")):
        generation = GenerationConfig.from_pretrained(path).eos_token_id
    for ids in (generation, of_config, of_tokenizer):
        if isinstance(ids, int):
            return [ids]
        if isinstance(ids, list | tuple) and ids:
            return [int(token_id) for token_id in ids]
    return []
