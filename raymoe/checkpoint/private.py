"""All that raymoe uses of transformers beyond its documented interface. Written for 5.24, and pinned to it.

What is relied on: models are built on the meta device; `get_model_conversion_mapping` lists the renamings
and conversions of an architecture; `convert_and_load_state_dict_in_model` reads each tensor by `tensor[...]`,
and only those whose renamed key is in the model's `state_dict()`; `_finalize_model_loading` ties weights and
fills buffers that no checkpoint holds; decorated experts classes carry `has_gate` and `_is_expert_parallel`;
`adapt` knows a few blocks by name.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    Mistral4Config,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.core_model_loading import dot_natural_key as dot_natural_key
from transformers.modeling_utils import LoadStateDictConfig
from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM
from transformers.utils.logging import disable_progress_bar

from raymoe.checkpoint.adapt import adapt
from raymoe.errors import CheckpointError, NotMoeError

# 5.24 has the class, but no entry for it.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)

# What transformers raises for a config it can't read or build from; it has no error class of its own.
_BAD_CONFIG = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    OSError,
    ImportError,
    RuntimeError,
    ArithmeticError,
    StrictDataclassError,
)


def read_config(path: Path) -> PretrainedConfig:
    """The config of a folder, without running code from it.

    Raises:
        CheckpointError: transformers doesn't know the model type, or refuses a value.
    """
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except _BAD_CONFIG as error:
        raise CheckpointError(f"{path / 'config.json'} is refused by transformers: {_line(error)}") from None


def attention_kinds(config: PretrainedConfig) -> set[str]:
    """What the layers of a model keep of earlier tokens, in the names of transformers' cache classes."""
    return set(get_layer_types_and_kwargs(config.get_text_config(decoder=True))[0])


def meta_model(
    config: PretrainedConfig, dtype: torch.dtype = torch.float32, attention: str | None = None
) -> PreTrainedModel:
    """The whole model on the meta device: shapes and modules, no memory. `config` stays as it is.

    Blocks with a contract of their own are adapted to the common one.

    The parameters have the load dtype, since at loading a parameter's dtype wins over everything else.

    Raises:
        NotMoeError: transformers has no causal language model for the config.
        CheckpointError: the config contradicts itself.
    """
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise NotMoeError(f"transformers has no text generation model for the model type {config.model_type}")
    options = {} if attention is None else {"attn_implementation": attention}
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(config), dtype=dtype, trust_remote_code=False, **options
            )
    except _BAD_CONFIG as error:
        raise CheckpointError(f"no {config.model_type} model can be built: {_line(error)}") from None
    adapt(model)
    return model


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """The routed experts modules by their full names, in layer order."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "_is_expert_parallel") and hasattr(module, "has_gate")
    }


@dataclass(frozen=True)
class Conversion:
    """How an architecture's checkpoint keys and tensors become its parameters."""

    mapping: list[Any]
    config: PretrainedConfig
    base_model_prefix: str
    dtype: torch.dtype
    dtype_plan: Mapping[str, torch.dtype]

    @classmethod
    def of(cls, model: PreTrainedModel, dtype: torch.dtype) -> Conversion:
        """The conversion of a meta model for a load dtype."""
        mapping = get_model_conversion_mapping(model)
        return cls(mapping, model.config, model.base_model_prefix, dtype, model._get_dtype_plan(dtype))

    def load(self, model: nn.Module, tensors: Mapping[str, Any]) -> Any:
        """Read `tensors` into `model`'s meta parameters; gives the library's loading info.

        Raises:
            CheckpointError: a shape doesn't fit, or a conversion fails; names the parameters.
        """
        disable_progress_bar()  # raymoe shows its own, by bytes
        info, _ = convert_and_load_state_dict_in_model(model, dict(tensors), self._load_config())
        if info.mismatched_keys:
            name, found, wanted = min(info.mismatched_keys)
            raise CheckpointError(
                f"{name} has shape {tuple(found)}, config.json asks for {tuple(wanted)}"
                + (f" (and {len(info.mismatched_keys) - 1} more)" if len(info.mismatched_keys) > 1 else "")
            )
        if info.conversion_errors:
            name, text = min(info.conversion_errors.items())
            lines = [line for line in text.splitlines() if line.strip()]
            raise CheckpointError(f"{name} can't be made from the checkpoint's tensors: {lines[-2:]}")
        return info

    def finish(self, model: PreTrainedModel, info: Any) -> None:
        """Tie weights and compute the buffers that no checkpoint holds."""
        type(model)._finalize_model_loading(model, self._load_config(), info)

    def _load_config(self) -> LoadStateDictConfig:
        return LoadStateDictConfig(
            dtype=self.dtype,
            dtype_plan=dict(self.dtype_plan),
            weight_mapping=self.mapping,
            device_map={"": "cpu"},
        )


@dataclass(frozen=True)
class Target:
    """Where one checkpoint key goes: parameters, and the pattern of the conversion if there is one.

    `patterns` are all that this conversion takes: a key must match each of them.
    """

    names: tuple[str, ...]
    pattern: str | None
    patterns: tuple[str, ...] = ()


def targets_of(model: PreTrainedModel, conversion: Conversion, keys: Iterable[str]) -> dict[str, Target]:
    """Checkpoint key → target, by the renaming that loading does; no names where the model has no place."""
    renamings = [one for one in conversion.mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in conversion.mapping if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    targets = {}
    for key in keys:
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name not in state:
            targets[key] = Target((), pattern)
        elif pattern is None:
            targets[key] = Target((name,), None)
        else:
            converter = by_pattern[pattern]
            first, *more = converter.target_patterns
            names = (name, *(name.replace(first, other) for other in more))
            targets[key] = Target(names, pattern, tuple(converter.source_patterns))
    return targets


def missing_and_unexpected(
    model: PreTrainedModel, targets: Mapping[str, Target], config: PretrainedConfig
) -> tuple[list[str], list[str]]:
    """Parameters that no key fills, and keys without a place; less what the architecture says may be so.

    `config` is the folder's, which may describe more than the text model.
    """
    filled = {name for target in targets.values() for name in target.names}
    for one, other in model.all_tied_weights_keys.items():
        if one in filled or other in filled:
            filled |= {one, other}
    may_miss = model._keys_to_ignore_on_load_missing or ()
    # Buffers that older checkpoints carried and that transformers computes since.
    may_remain = {
        *(model._keys_to_ignore_on_load_unexpected or ()),
        r"rotary_emb\.inv_freq$",
        r"position_ids$",
        *_unused_parts(config),
    }
    missing = [name for name in model.state_dict() if name not in filled and not _any(may_miss, name)]
    unexpected = [key for key, target in targets.items() if not target.names and not _any(may_remain, key)]
    return missing, sorted(unexpected)


def _unused_parts(config: PretrainedConfig) -> Iterator[str]:
    """Patterns of tensors that checkpoints ship and text generation doesn't use.

    Layers behind the last one predict several tokens at once (DeepSeek-V3, GLM); transformers' own patterns name
    the layer numbers of the released sizes only. The rest are towers for images and sound.
    """
    text = config.get_text_config(decoder=True)
    layers, extra = text.num_hidden_layers, getattr(text, "num_nextn_predict_layers", None) or 0
    for number in range(layers, layers + extra):
        yield rf"(^|\.)layers\.{number}\."
    if text is not config:
        yield r"^(model\.)?(vision|visual|audio|multi_modal_projector)"


def branch(conversion: Conversion, name: str, leaf: nn.Module) -> nn.Module:
    """A model that holds the module `name` alone, fit for `Conversion.load`."""
    root = nn.Module()
    root.base_model_prefix, root.config = conversion.base_model_prefix, conversion.config
    *parents, last = name.split(".")
    node = root
    for part in parents:
        child = nn.Module()
        node.add_module(part, child)
        node = child
    node.add_module(last, leaf)
    return root


def read_generation_config(path: Path) -> GenerationConfig | None:
    """The folder's generation_config.json, if it has one.

    Raises:
        CheckpointError: it is there but malformed.
    """
    if not (path / "generation_config.json").is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(path, local_files_only=True)
    except _BAD_CONFIG as error:
        raise CheckpointError(f"{path / 'generation_config.json'} is refused: {_line(error)}") from None


def _any(patterns: Iterable[str], text: str) -> bool:
    return any(re.search(pattern, text) for pattern in patterns)


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:300] + "…"
