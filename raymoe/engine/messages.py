"""What ingress, router replica and engine process say to each other: small typed records."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. `temperature == 0` is greedy; `top_k == 0` means no limit.

    A draw depends only on (seed, position), so a replayed sequence draws the same tokens again.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


@dataclass(frozen=True)
class GenerateRequest:
    """One sequence to continue. Everything is validated before this record is made.

    `stop_token_ids` end the sequence and are not returned. `deadline_s` counts from its arrival at the engine.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: tuple[int, ...] = ()
    deadline_s: float = 600.0


@dataclass(frozen=True)
class GenerateChunk:
    """New tokens of one sequence. The last chunk has a `finish_reason`, and may hold no token."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class EngineConfig:
    """All that an engine process is told at its start. Sizes in bytes, times in seconds.

    `dtype` is a torch dtype's name or "auto"; `token` is the lanes' shared secret.
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

    def to_wire(self) -> dict[str, Any]:
        """As a plain dict."""
        return asdict(self)
