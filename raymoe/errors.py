"""The one error tree of raymoe, and the one table that maps it to HTTP and gRPC.

RaymoeError
├── ConfigError                a setting, file or option of the operator
├── CheckpointError            a model folder (names file and tensor)
│   └── NotMoeError            a good folder, but not a Mixture-of-Experts model
├── MemoryLimitError           it will not fit (names needed and available bytes)
├── ClusterError               Ray itself: versions, ports, actors that do not start
│   └── SupersededError        another deployment of the same application took over
├── RequestError               what a client sent (names the field)
│   ├── NotFoundError          there is nothing of this name
│   │   └── ModelNotFoundError
│   ├── AuthenticationError    it has no API key, or none that is valid
│   ├── TooSlowError           its bytes did not come in time
│   ├── TooLargeError          more bytes than a request may have
│   ├── ContextLengthError
│   └── VocabularyError
├── OverloadedError            try again later
│   └── RateLimitError         this client has had what it may have for now
├── NotReadyError              still loading, or a part is missing
│   └── RouterLostError        the router that had a request is gone; another one can go on with it
├── DeadlineError              a request ran out of its time
├── ExpertUnavailableError     no living copy (names layer and group)
├── LaneError                  one lane to one expert group
│   ├── LaneClosedError        the peer is gone
│   ├── LaneTimeoutError       the peer is silent
│   └── HelloRefusedError      the two sides do not fit together
├── StaleLayoutError           a group does not hold what the router's layout says
├── NoAnswerError              a client's: no server answers, or not as one of raymoe would
└── EngineError                a defect of ours
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class RaymoeError(Exception):
    """Base of all errors that raymoe raises on purpose. The text is fit for the person who caused it."""

    @property
    def message(self) -> str:
        """The text without the class name."""
        return str(self)


class ConfigError(RaymoeError):
    """A setting is unknown, malformed or contradicts another."""


class CheckpointError(RaymoeError):
    """A model folder can't be read as what its index and config say."""


class NotMoeError(CheckpointError):
    """The folder holds a model without routed experts, or of an architecture raymoe can't split."""


class MemoryLimitError(RaymoeError):
    """Loading would need more memory than there is."""


class ClusterError(RaymoeError):
    """Ray could not be reached, or could not do what raymoe needs."""


class SupersededError(ClusterError):
    """Another deployment of the same application has taken over."""


class RequestError(RaymoeError):
    """A client's request is wrong. `param` is a field path, never the value."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class NotFoundError(RequestError):
    """The request names something that there is not."""


class TooLargeError(RequestError):
    """The request has more bytes than the server takes."""


class AuthenticationError(RequestError):
    """The request has no API key, or none that is valid."""


class TooSlowError(RequestError):
    """The request did not arrive whole in time."""


class ModelNotFoundError(NotFoundError):
    """The request names a model that is not served."""


class ContextLengthError(RequestError):
    """Prompt and completion don't fit the model's context or the KV limit."""


class VocabularyError(RequestError):
    """A token id lies outside the model's vocabulary."""


class OverloadedError(RaymoeError):
    """Queues are full; the client should come again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimitError(OverloadedError):
    """One client has reached a limit of its own."""


class NotReadyError(RaymoeError):
    """The server can't answer yet: the text names the missing part."""


class RouterLostError(NotReadyError):
    """The router that had the request is gone, or its engine. The ingress replays the request elsewhere."""


class DeadlineError(RaymoeError):
    """The request's own deadline passed."""


class ExpertUnavailableError(RaymoeError):
    """No living copy of an expert that the request needs.

    `rows` are the rows of the call that need it, none if that isn't known; they stay in the process.
    """

    def __init__(
        self, layer: int, groups: tuple[str, ...], detail: str = "", rows: Sequence[int] = ()
    ) -> None:
        super().__init__(
            f"no living copy of an expert of MoE layer {layer}: expert group {', '.join(groups)} is unavailable"
            + (f" ({detail})" if detail else "")
        )
        self.layer, self.groups, self.detail, self.rows = layer, groups, detail, rows

    def __reduce__(self) -> tuple[type, tuple[int, tuple[str, ...], str]]:
        return type(self), (self.layer, self.groups, self.detail)


class LaneError(RaymoeError):
    """One lane to one expert group failed; `group` names it."""

    def __init__(self, group: str, detail: str) -> None:
        super().__init__(f"lane to expert group {group}: {detail}")
        self.group, self.detail = group, detail

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.group, self.detail)


class LaneClosedError(LaneError):
    """The peer closed its end or died."""


class LaneTimeoutError(LaneError):
    """The peer did not answer before the deadline."""


class HelloRefusedError(LaneError):
    """Protocol version, token, fingerprint, dtype or sizes of the two sides differ."""


class StaleLayoutError(LaneError):
    """The group does not hold the slot and generation that the router's layout names."""


class NoAnswerError(RaymoeError):
    """No server answers where a client asked, or what does is none of raymoe's, or the answer broke off."""


class EngineError(RaymoeError):
    """A defect in raymoe. Its details go to the log, not to the client."""


@dataclass(frozen=True)
class Status:
    """How one kind of error looks to a client.

    `grpc` is the name of a `grpc.StatusCode`; `public` says whether the error's own text may be shown.
    """

    http: int
    code: str
    type: str
    grpc: str
    public: bool = True


STATUS: dict[type[RaymoeError], Status] = {
    RaymoeError: Status(500, "internal_error", "server_error", "INTERNAL", public=False),
    ConfigError: Status(500, "misconfigured", "server_error", "FAILED_PRECONDITION", public=False),
    CheckpointError: Status(500, "bad_checkpoint", "server_error", "FAILED_PRECONDITION", public=False),
    MemoryLimitError: Status(500, "out_of_memory", "server_error", "RESOURCE_EXHAUSTED", public=False),
    ClusterError: Status(503, "cluster_unavailable", "server_error", "UNAVAILABLE", public=False),
    RequestError: Status(400, "invalid_request", "invalid_request_error", "INVALID_ARGUMENT"),
    NotFoundError: Status(404, "not_found", "invalid_request_error", "NOT_FOUND"),
    AuthenticationError: Status(401, "invalid_api_key", "invalid_request_error", "UNAUTHENTICATED"),
    TooSlowError: Status(408, "request_timeout", "invalid_request_error", "DEADLINE_EXCEEDED"),
    TooLargeError: Status(413, "request_too_large", "invalid_request_error", "RESOURCE_EXHAUSTED"),
    ModelNotFoundError: Status(404, "model_not_found", "invalid_request_error", "NOT_FOUND"),
    ContextLengthError: Status(400, "context_length_exceeded", "invalid_request_error", "INVALID_ARGUMENT"),
    VocabularyError: Status(400, "token_out_of_vocabulary", "invalid_request_error", "INVALID_ARGUMENT"),
    OverloadedError: Status(429, "overloaded", "server_error", "RESOURCE_EXHAUSTED"),
    RateLimitError: Status(429, "rate_limit_exceeded", "rate_limit_error", "RESOURCE_EXHAUSTED"),
    NotReadyError: Status(503, "not_ready", "server_error", "UNAVAILABLE"),
    DeadlineError: Status(504, "deadline_exceeded", "server_error", "DEADLINE_EXCEEDED"),
    ExpertUnavailableError: Status(503, "expert_unavailable", "server_error", "UNAVAILABLE"),
    LaneError: Status(503, "expert_unavailable", "server_error", "UNAVAILABLE"),
    EngineError: Status(500, "internal_error", "server_error", "INTERNAL", public=False),
}


def status_of(error: BaseException) -> Status:
    """The table entry of the error's nearest class; anything foreign is an internal error."""
    for cls in type(error).__mro__:
        if cls in STATUS:
            return STATUS[cls]
    return STATUS[RaymoeError]
