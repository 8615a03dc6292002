"""From what an operator wrote (a folder or a Hub id) to a folder."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from raymoe.checkpoint.folder import has_all_files
from raymoe.errors import CheckpointError

_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
"""Config, weights and tokenizer; never pickles or code."""


def resolve(path_or_id: str) -> Path:
    """An existing folder as it is; else a Hub id, from the local cache or, where allowed, from the network.

    Raises:
        CheckpointError: neither a folder nor an id that can be had, in one sentence.
    """
    path = Path(path_or_id).expanduser()
    if path_or_id and path.is_dir():
        return path
    if path.is_file():
        raise CheckpointError(f"{path} is a file; a model is a folder with config.json and *.safetensors")
    if path_or_id.startswith((".", "/", "~")) or path_or_id.count("/") != 1:
        raise CheckpointError(f"there is no folder {path_or_id!r}")
    try:
        cached = Path(snapshot_download(path_or_id, allow_patterns=_PATTERNS, local_files_only=True))
        if has_all_files(cached):
            return cached
    except LocalEntryNotFoundError:
        pass
    except HFValidationError:
        raise CheckpointError(f"{path_or_id} is neither a folder nor a Hugging Face id") from None
    try:
        return Path(snapshot_download(path_or_id, allow_patterns=_PATTERNS))
    except (HfHubHTTPError, OSError) as error:
        raise CheckpointError(
            f"{path_or_id} is neither a folder nor a complete model in the local Hugging Face cache, and"
            f" it can't be downloaded: {_reason(error)}"
        ) from None


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
