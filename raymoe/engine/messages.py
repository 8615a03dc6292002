"""What ingress, router replica and engine process say to each other: small typed records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, Literal, NamedTuple

FinishReason = Literal["stop", "length"]

ANONYMOUS = "anonymous"
"""The one client that all requests belong to where there are no API keys."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. `temperature == 0` is greedy; `top_k == 0` means no limit.

    A draw depends only on (seed, position), so a replayed sequence draws the same tokens again. What the later
    fields do, and in which order, is written in `model/adjust.py`; `logit_bias` holds (token id, bias) and
    `late_ids` what can't be drawn before `min_tokens` tokens are generated: all ids that end a sequence.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    late_ids: tuple[int, ...] = ()
    typical_p: float = 1.0


@dataclass(frozen=True)
class GenerateRequest:
    """One sequence to continue. Everything is validated before this record is made.

    `stop_token_ids` end the sequence and are not returned. `deadline_s` counts from its arrival at the engine.
    `generated_ids` are tokens that another router has generated already: the sequence goes on behind them, they
    are not returned again, and `max_tokens` counts them.

    `logprobs` asks for the log probability of each generated token and of so many of the likeliest ones;
    `prompt_logprobs` for the same of the prompt's tokens, of which `prompt_scored` are known from another router.
    Only then may `max_tokens` be 0.

    `grammar`, in llguidance's form, is what the text must fit.

    `client` says whose request it is: the scheduler shares steps fairly among clients.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: tuple[int, ...] = ()
    deadline_s: float = 600.0
    generated_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_scored: int = 0
    client: str = ANONYMOUS
    grammar: str | None = None


class TokenLogprob(NamedTuple):
    """A token's log probability, its rank (1: none is likelier), and (id, log probability) of the likeliest.

    `model/logprobs.py` says of which distribution. Minus infinity is possible.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class GenerateChunk:
    """New tokens of one sequence. The last chunk has a `finish_reason`, and may hold no token.

    A first chunk without anything says that a router has the request. `logprobs` has one entry for each token
    if they were asked for. `prompt_logprobs` go on where those of the chunk before ended; the first is that of
    the prompt's second token, and all come before the first generated token.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def empty(self) -> bool:
        """It says nothing but that a router has the request."""
        return not (self.token_ids or self.finish_reason or self.prompt_logprobs)


def joined(chunks: Sequence[GenerateChunk]) -> GenerateChunk:
    """Consecutive chunks of one sequence as one."""
    if len(chunks) == 1:
        return chunks[0]
    return GenerateChunk(
        tuple(chain.from_iterable(chunk.token_ids for chunk in chunks)),
        chunks[-1].finish_reason,
        tuple(chain.from_iterable(chunk.logprobs for chunk in chunks)),
        tuple(chain.from_iterable(chunk.prompt_logprobs for chunk in chunks)),
    )


@dataclass(frozen=True)
class EngineConfig:
    """All that an engine process is told at its start. Sizes in bytes, times in seconds.

    `dtype` is a torch dtype's name or "auto", `token` is the lanes' shared secret, and `deterministic` asks for
    batch-invariant steps.
    """

    checkpoint: str
    router: str
    token: str
    dtype: str
    threads: int
    lane_bytes: int
    silence_s: float
    replace_timeout_s: float
    kv_bytes: int
    step_tokens: int
    max_sequences: int
    max_waiting: int
    deterministic: bool = False

    def to_wire(self) -> dict[str, Any]:
        """As a plain dict."""
        return asdict(self)
