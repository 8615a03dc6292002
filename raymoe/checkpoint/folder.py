"""An opened Hugging Face folder: its config and where each tensor lies. No weight is read here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from raymoe.checkpoint import private
from raymoe.checkpoint.adapt import why_not
from raymoe.checkpoint.tensors import TensorEntry, read_header
from raymoe.errors import CheckpointError, NotMoeError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose config and file headers fit together.

    `fingerprint` is a hex digest over config.json and all safetensors headers: names, dtypes, shapes and
    places of all tensors, but not their values.
    """

    path: Path
    config: PretrainedConfig
    tensors: Mapping[str, TensorEntry] = field(repr=False)
    fingerprint: str

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Read config.json, the index and the headers of the files that the index names.

        Raises:
            CheckpointError: something is absent, cut short, malformed, quantised or contradictory.
            NotMoeError: a good folder, but of a model without routed experts.
        """
        path = Path(path).expanduser()
        if not path.is_dir():
            raise CheckpointError(f"there is no folder {path}")
        digest = hashlib.sha256()
        raw = _read_json(path / "config.json", digest)
        if quantised := raw.get("quantization_config"):
            method = quantised.get("quant_method", "?") if isinstance(quantised, dict) else "?"
            raise CheckpointError(
                f"{path} is quantised ({method}); raymoe loads float32, bfloat16 and float16 checkpoints"
            )
        config = private.read_config(path)
        tensors: dict[str, TensorEntry] = {}
        for file, names in sorted(_weight_files(path).items()):
            header, entries = read_header(path / file)
            digest.update(file.encode() + b"\0" + header)
            absent, extra = (
                sorted((names or set()) - entries.keys()),
                sorted(entries.keys() - (names or entries)),
            )
            if absent:
                raise CheckpointError(f"{path / file} lacks {some(absent)}, which {INDEX} says it holds")
            if extra:
                raise CheckpointError(
                    f"{path / file} holds {some(extra)}, which {INDEX} doesn't place there:"
                    " are index and files of one download?"
                )
            tensors.update(entries)
        checkpoint = cls(path, config, tensors, digest.hexdigest())
        model = private.meta_model(config)
        if not private.experts_of(model):
            reason = why_not(model)
            raise NotMoeError(
                f"{path} holds a {config.model_type} model, whose experts raymoe can't split: {reason}"
                if reason
                else f"{path} holds a {config.model_type} model without routed experts;"
                " raymoe serves Mixture-of-Experts models"
            )
        return checkpoint


def has_all_files(path: Path) -> bool:
    """Whether config.json and each file that holds weights are there (their content is not looked at)."""
    try:
        files = ["config.json", *_weight_files(path)]
    except CheckpointError:
        return False
    return all((path / file).is_file() for file in files)


def _weight_files(path: Path) -> dict[str, set[str] | None]:
    """File name → the tensors that the index places in it (None: no index, all that it holds)."""
    if (path / SINGLE).exists():
        return {SINGLE: None}
    if not (path / INDEX).exists():
        found = sorted(
            file.name for file in path.iterdir() if file.suffix in (".safetensors", ".bin", ".pth")
        )
        if any(name.endswith(".safetensors") for name in found):
            raise CheckpointError(f"{path} has neither {SINGLE} nor {INDEX}, only {some(found)}")
        if found:
            raise CheckpointError(f"{path} has weights as {some(found)} only; raymoe reads safetensors alone")
        raise CheckpointError(f"{path} has no weights: neither {SINGLE} nor {INDEX} is there")
    weight_map = _read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / INDEX} has no weight_map")
    files: dict[str, set[str] | None] = {}
    for name, file in weight_map.items():
        # A file elsewhere is not part of this folder, whatever the index says.
        if not isinstance(file, str) or file != Path(file).name or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{path / INDEX} places tensor {name} in {file!r}, not a safetensors file here"
            )
        names = files.setdefault(file, set())
        if names is not None:
            names.add(name)
    absent = sorted(file for file in files if not (path / file).is_file())
    if absent:
        raise CheckpointError(
            f"{path} lacks {some(absent)}, which {INDEX} names: is the download incomplete?"
        )
    return files


def _read_json(file: Path, digest: Any = None) -> dict[str, Any]:
    try:
        raw = file.read_bytes()
        value = json.loads(raw)
    except OSError as error:
        raise CheckpointError(f"{file} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} must hold a JSON object")
    if digest is not None:
        digest.update(raw)
    return value


def some(names: list[str]) -> str:
    """The first five names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
