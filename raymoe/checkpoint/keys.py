"""Which tensors of a checkpoint belong to the router, and which to each expert of each MoE layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

from torch import nn
from transformers import PreTrainedModel

from raymoe.checkpoint.fills import check_fills
from raymoe.checkpoint.folder import Checkpoint, some
from raymoe.checkpoint.private import Conversion, dot_natural_key, missing_and_unexpected, targets_of
from raymoe.checkpoint.tensors import LazyTensor, OnBytes, TensorEntry
from raymoe.errors import CheckpointError

_Sources = dict[tuple[str, str | None], list[str]]
"""(parameter, conversion pattern) → the checkpoint keys that go there."""


@dataclass(frozen=True)
class LayerSources:
    """The tensors of one MoE layer's experts.

    `separate[e]` are those of expert e alone; each of `stacked` holds all experts along its dimension 0.
    """

    separate: tuple[tuple[TensorEntry, ...], ...]
    stacked: tuple[TensorEntry, ...]

    def lazy(self, experts: Sequence[int], on_bytes: OnBytes | None = None) -> dict[str, LazyTensor]:
        """What must be read for `experts` (ascending, no duplicates), by checkpoint key."""
        rows = list(_runs(experts))
        picked = {entry.name: LazyTensor(entry, rows, on_bytes) for entry in self.stacked}
        for expert in experts:
            picked |= {entry.name: LazyTensor(entry, None, on_bytes) for entry in self.separate[expert]}
        return picked


@dataclass(frozen=True)
class Keys:
    """The checkpoint's tensors, each with exactly one owner."""

    router: tuple[TensorEntry, ...]
    layers: tuple[LayerSources, ...]

    def names(self) -> Iterator[str]:
        """The names of all."""
        stacked = (layer.stacked for layer in self.layers)
        separate = (own for layer in self.layers for own in layer.separate)
        return (entry.name for entry in chain(self.router, *stacked, *separate))


def split_keys(
    checkpoint: Checkpoint, model: PreTrainedModel, conversion: Conversion, experts: dict[str, nn.Module]
) -> Keys:
    """Assign each tensor to the router or to experts, by the names that the library's own loading gives it.

    Raises:
        CheckpointError: names the first parameters that no tensor fills, tensors that have no place in the
            model, experts that lack a tensor; and as `check_fills`.
    """
    targets = targets_of(model, conversion, checkpoint.tensors)
    missing, unexpected = missing_and_unexpected(model, targets, checkpoint.config)
    if missing:
        raise CheckpointError(
            f"{checkpoint.path} lacks tensors for {some(missing)}: is the download incomplete?"
        )
    if unexpected:
        raise CheckpointError(
            f"{checkpoint.path} holds tensors that {type(model).__name__} has no place for:"
            f" {some(unexpected)}"
        )
    router: list[TensorEntry] = []
    by_layer: dict[str, dict[tuple[str, str | None], list[str]]] = {
        name: defaultdict(list) for name in experts
    }
    for key, target in targets.items():
        layer = target.names[0].rpartition(".")[0] if target.names else ""
        if layer in by_layer:
            by_layer[layer][target.names[0], target.pattern].append(key)
        elif target.names:
            router.append(checkpoint.tensors[key])
    layers = [_layer_sources(checkpoint, name, module, by_layer[name]) for name, module in experts.items()]
    keys = Keys(tuple(router), tuple(layers))
    check_fills(checkpoint, model.state_dict(), {name: targets[name] for name in keys.names()})
    return keys


def _layer_sources(checkpoint: Checkpoint, layer: str, module: nn.Module, groups: _Sources) -> LayerSources:
    count = module.num_experts
    separate: list[list[TensorEntry]] = [[] for _ in range(count)]
    stacked: list[TensorEntry] = []
    for (parameter, _), keys in groups.items():
        entries = [checkpoint.tensors[key] for key in sorted(keys, key=dot_natural_key)]
        if len(entries) == count + getattr(module, "identity_experts", 0):
            entries = entries[:count]
        if len(entries) == count:
            # The library stacks in this same order, so position is the expert's number.
            for own, entry in zip(separate, entries, strict=True):
                own.append(entry)
        elif len(entries) == 1 and entries[0].shape[:1] == (count,):
            stacked.append(entries[0])
        elif len(entries) == 1:
            raise CheckpointError(
                f"{entries[0].file}, tensor {entries[0].name}: shape {entries[0].shape}, but"
                f" dimension 0 must be the {count} experts of {layer}"
            )
        else:
            raise CheckpointError(
                f"{checkpoint.path} has {len(entries)} tensors for the {count} experts of {parameter}"
                f" ({_gap([entry.name for entry in entries], count)}): is the download incomplete?"
            )
    return LayerSources(tuple(tuple(own) for own in separate), tuple(stacked))


def _gap(names: list[str], count: int) -> str:
    """Name the tensors that are not there, if the names differ in one number only."""
    columns = list(zip(*(name.split(".") for name in names), strict=False))
    varying = [i for i, column in enumerate(columns) if len(set(column)) > 1]
    if len(varying) != 1 or not all(part.isdigit() for part in columns[varying[0]]):
        return f"such as {names[0]}"
    have = {int(part) for part in columns[varying[0]]}
    parts = names[0].split(".")
    absent = [str(expert) for expert in range(count) if expert not in have]
    if not absent:
        return f"such as {names[-1]}"
    return "absent: " + some([".".join([*parts[: varying[0]], e, *parts[varying[0] + 1 :]]) for e in absent])


def _runs(experts: Sequence[int]) -> list[range]:
    """Ascending numbers as contiguous ranges.

    >>> _runs([2, 3, 4, 7])
    [range(2, 5), range(7, 8)]
    """
    runs = []
    for _, group in groupby(enumerate(experts), lambda pair: pair[1] - pair[0]):
        numbers = [expert for _, expert in group]
        runs.append(range(numbers[0], numbers[-1] + 1))
    return runs
