"""From what an operator wrote (a folder or a Hub id) to a folder."""

from __future__ import annotations

from pathlib import Path

import httpx2
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from raymoe.checkpoint.folder import has_all_files
from raymoe.errors import CheckpointError

_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
"""Config, weights and tokenizer; never pickles or code."""
_UNWANTED = ["*/*", "consolidated*"]
"""Folders within, and the weights a second time in their makers' own format."""


def resolve(path_or_id: str) -> Path:
    """An existing folder as it is; else a Hub id, from the local cache or, where allowed, from the network.

    An id is "org/name" or "org/name@revision" (branch, tag or commit). huggingface_hub shows the progress.

    Raises:
        CheckpointError: neither a folder nor an id that can be had, in one sentence.
    """
    path = Path(path_or_id).expanduser()
    if path_or_id and path.is_dir():
        return path
    if path.is_file():
        raise CheckpointError(f"{path} is a file; a model is a folder with config.json and *.safetensors")
    repo, at, revision = path_or_id.partition("@")
    if path_or_id.startswith((".", "/", "~")) or repo.count("/") != 1 or bool(at) != bool(revision):
        raise CheckpointError(f"there is no folder {path_or_id!r}")
    try:
        cached = _snapshot(repo, revision or None, local_files_only=True)
        if has_all_files(cached):
            return cached
    except LocalEntryNotFoundError:
        pass
    except HFValidationError:
        raise CheckpointError(f"{path_or_id} is neither a folder nor a Hugging Face id") from None
    try:
        return _snapshot(repo, revision or None)
    except (HfHubHTTPError, httpx2.TransportError, OSError) as error:
        raise CheckpointError(
            f"{path_or_id} is neither a folder nor a complete model in the local Hugging Face cache, and"
            f" it can't be downloaded: {_reason(error)}"
        ) from None


def _snapshot(repo: str, revision: str | None, local_files_only: bool = False) -> Path:
    folder = snapshot_download(
        repo,
        revision=revision,
        allow_patterns=_WANTED,
        ignore_patterns=_UNWANTED,
        local_files_only=local_files_only,
    )
    return Path(str(folder))


def _reason(error: Exception) -> str:
    # The library reports most failures as "not in the cache" and keeps what happened as the cause.
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    # Special cases first: a gated repository is a kind of one that isn't found.
    if isinstance(error, GatedRepoError):
        return "it is gated: accept its terms on huggingface.co and set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return "huggingface.co has no such model, or it is private: check the name, or set HF_TOKEN"
    if isinstance(error, RevisionNotFoundError):
        return "the model has no such revision"
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it, or give a folder"
    if isinstance(error, (LocalEntryNotFoundError, httpx2.TransportError)):
        return "huggingface.co can't be reached; give a folder, or download the model where it can"
    return " ".join(str(error).split())[:200] or type(error).__name__
