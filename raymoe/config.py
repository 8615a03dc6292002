"""Frozen settings, complete at birth. YAML, environment and command line all end here; unknown keys are errors."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from raymoe.errors import ConfigError

ENV_PREFIX = "RAYMOE_"


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelSettings(_Section):
    """Which checkpoint is served, and under which name."""

    path: str | None = None
    """Folder or Hugging Face id; None serves the embedded default."""
    name: str | None = None
    """The id that clients use; by default the folder's name."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_context: int | None = Field(default=None, ge=1)
    """Tokens per sequence; by default what the checkpoint's config says."""
    deterministic: bool = False
    """Batch-invariant mode: the bits of a sequence's logits depend on its own tokens alone."""


class GroupSettings(_Section):
    """The expert groups."""

    count: int = Field(default=2, ge=1)
    threads: int = Field(default=1, ge=1)
    """torch threads of each expert group."""
    cpus: float = Field(default=0.1, gt=0)
    """CPU share that Ray reserves for each group; for placement only, it limits nothing."""
    gpus: float = Field(default=0, ge=0)
    lane: Literal["shm", "object_store"] = "shm"
    """How rows travel between routers and groups; `object_store` is the slow reference."""
    lane_bytes: int = Field(default=64 << 20, ge=64 << 10)
    """Size of each of a lane's two rings."""
    reply_timeout_s: float = Field(default=30.0, gt=0)
    """How long a router waits for a group that makes no progress."""
    replace_timeout_s: float = Field(default=60.0, gt=0)
    """How long requests wait for a lost group's replacement before they get a 503."""


class RouterSettings(_Section):
    """The routers and their engines."""

    replicas: int = Field(default=1, ge=1)
    threads: int = Field(default=2, ge=1)
    cpus: float = Field(default=0.1, gt=0)
    kv_bytes: int = Field(default=1 << 30, ge=1 << 20)
    """KV cache limit of each router."""
    step_tokens: int = Field(default=512, ge=1)
    """Token budget of one step: decodes first, then prefill chunks."""
    max_sequences: int = Field(default=64, ge=1)
    """Sequences that run at once in one router."""
    max_waiting: int = Field(default=256, ge=0)
    """Sequences that wait in one router; one more is refused with 429."""


class ServerSettings(_Section):
    """What clients reach."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    grpc_port: int | None = Field(default=None, ge=1, le=65535)
    """None: no gRPC."""
    app: str = Field(default="raymoe", pattern=r"^[a-z0-9][a-z0-9-]{0,30}$")
    """Names the Serve application and every actor of it."""
    keys_file: str | None = None
    """API keys, a line each: label, SHA-256 digest, own limits. With neither this nor `keys` all are let in."""
    keys: dict[str, str] = Field(default_factory=dict)
    """More API keys: label to the rest of such a line."""
    tls_cert: str | None = None
    """PEM file of the certificate, and of those between it and its authority; makes HTTP HTTPS."""
    tls_key: str | None = None
    """PEM file of its private key."""
    cors_origins: list[str] = Field(default_factory=list)
    """Origins whose pages may use the server from a browser, or `*`; by default none."""
    max_requests: int = Field(default=1000, ge=1)
    """Requests that are being answered at once, waiting ones included; one more is refused with 429."""
    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    body_timeout_s: float = Field(default=60.0, gt=0)
    """How long a request's body may take to arrive."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Tokens of each prompt; by default what the model's context leaves."""
    normalise_text: bool = False
    """Prompts in NFKC, without control characters and those that nobody sees."""
    request_timeout_s: float = Field(default=600.0, gt=0)

    @property
    def guarded(self) -> bool:
        """Whether requests need an API key."""
        return self.keys_file is not None or bool(self.keys)

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if origin != "*" and not re.fullmatch(r"https?://[a-z0-9.\-\[\]:]+", origin):
                raise ValueError(f"{origin!r} is no origin, such as https://chat.example.org, nor *")
        return origins


class ClientSettings(_Section):
    """What each client may do; without API keys, all of them together. None: without limit."""

    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Tokens of prompts and generated ones."""
    concurrent_requests: int | None = Field(default=None, ge=1)


class Settings(_Section):
    """All settings of one server."""

    model: ModelSettings = Field(default_factory=ModelSettings)
    groups: GroupSettings = Field(default_factory=GroupSettings)
    router: RouterSettings = Field(default_factory=RouterSettings)
    server: ServerSettings = Field(default_factory=ServerSettings)
    clients: ClientSettings = Field(default_factory=ClientSettings)

    @classmethod
    def build(cls, values: Mapping[str, Any], where: str = "settings") -> Settings:
        """Validate nested values.

        Raises:
            ConfigError: names the first wrong key, what is accepted and where it was given.
        """
        try:
            return cls.model_validate(dict(values))
        except ValidationError as error:
            raise ConfigError(_explain(error, where)) from None

    @classmethod
    def load(
        cls,
        file: Path | None = None,
        environ: Mapping[str, str] | None = None,
        overrides: Mapping[str, Any] | None = None,
    ) -> Settings:
        """Merge the YAML file, then `RAYMOE_SECTION__KEY` variables, then the overrides (`section.key`).

        Raises:
            ConfigError: for an unreadable file, an unknown key or a value that doesn't fit.
        """
        values: dict[str, Any] = {}
        where = []
        if file is not None:
            where.append(str(file))
            _merge(values, _read_yaml(file))
        environ = os.environ if environ is None else environ
        for key in sorted(environ):
            if key.startswith(ENV_PREFIX) and key not in _OTHER_ENV:
                section, _, name = key[len(ENV_PREFIX) :].lower().partition("__")
                if not name:
                    raise ConfigError(
                        f"environment variable {key} is unknown: settings are {ENV_PREFIX}SECTION__KEY"
                        f" (such as {ENV_PREFIX}GROUPS__COUNT); also known: {', '.join(sorted(_OTHER_ENV))}"
                    )
                where.append(key)
                try:
                    _merge(values, {section: {name: yaml.safe_load(environ[key])}})
                except yaml.YAMLError:
                    raise ConfigError(f"environment variable {key}: {environ[key]!r} is not YAML") from None
        for dotted, value in (overrides or {}).items():
            if value is not None:
                section, _, name = dotted.partition(".")
                where.append(f"option {dotted}")
                _merge(values, {section: {name: value}})
        return cls.build(values, ", ".join(where) or "defaults")


_OTHER_ENV = frozenset({"RAYMOE_CACHE", "RAYMOE_API_KEY"})
"""Variables with the prefix that are not settings: where the embedded default is kept, and the key of a client."""


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        read = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"settings file {file} can't be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"settings file {file} is not YAML: {error}") from None
    if read is None:
        return {}
    if not isinstance(read, dict):
        raise ConfigError(f"settings file {file} must be a mapping of {', '.join(Settings.model_fields)}")
    return read


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def _explain(error: ValidationError, where: str) -> str:
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        fields = Settings.model_fields
        if len(first["loc"]) > 1:
            section = fields[str(first["loc"][0])].annotation
            accepted = ", ".join(getattr(section, "model_fields", {}))
        else:
            accepted = ", ".join(fields)
        return f"unknown setting {path} (from {where}); accepted here: {accepted}"
    return f"setting {path}: {first['msg']}, got {first['input']!r} (from {where})"
