"""Whether a checkpoint's tensors fill each parameter once and with its size, told from names and headers alone."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping

from torch import Tensor

from raymoe.checkpoint.folder import Checkpoint, some
from raymoe.checkpoint.private import Target
from raymoe.checkpoint.tensors import DTYPES, TensorEntry
from raymoe.errors import CheckpointError

_FLOATS = ("F64", "F32", "F16", "BF16")
_Sources = dict[str | None, list[TensorEntry]]
"""Conversion pattern (None: no conversion) → the tensors that match it."""


def check_fills(checkpoint: Checkpoint, state: Mapping[str, Tensor], targets: Mapping[str, Target]) -> None:
    """Check the tensors that have a place in the model; `state` is the meta model's.

    Raises:
        CheckpointError: a parameter is filled twice or in part, or by tensors of another size or kind.
    """
    filled: dict[tuple[str, ...], _Sources] = defaultdict(lambda: defaultdict(list))
    patterns: dict[tuple[str, ...], tuple[str, ...]] = {}
    for key, target in targets.items():
        if target.names:
            filled[target.names][target.pattern].append(checkpoint.tensors[key])
            patterns[target.names] = patterns.get(target.names) or target.patterns
    owners: dict[str, tuple[str, ...]] = {}
    for names, sources in filled.items():
        entries = [entry for group in sources.values() for entry in group]
        for name in names:
            other = owners.setdefault(name, names)
            direct = len(sources.get(None, []))
            if other != names or direct > 1 or (direct and len(sources) > 1):
                twice = {entry.name for group in filled[other].values() for entry in group}
                twice |= {entry.name for entry in entries}
                raise CheckpointError(
                    f"{checkpoint.path} defines {name} more than once: {some(sorted(twice))}"
                )
        absent = [] if None in sources else [one for one in patterns[names] if one not in sources]
        _check_sizes(names, entries, state, absent)


def _check_sizes(
    names: tuple[str, ...], entries: list[TensorEntry], state: Mapping[str, Tensor], absent: list[str]
) -> None:
    first = entries[0]
    wanted = tuple(state[names[0]].shape)
    if state[names[0]].is_floating_point():
        wrong = [entry for entry in entries if entry.dtype not in _FLOATS]
        if wrong:
            raise CheckpointError(
                f"{wrong[0].file}, tensor {wrong[0].name} is {wrong[0].dtype}: quantised? raymoe loads"
                f" {', '.join(str(DTYPES[dtype]).removeprefix('torch.') for dtype in _FLOATS)}"
            )
    if len(entries) == 1 and len(names) == 1 and len(first.shape) == len(wanted):
        # A conversion may swap the dimensions, so their order is the loading's to check.
        same = sorted(first.shape) == sorted(wanted)
    else:
        # Conversions stack, split, join and transpose: none makes or drops an element.
        have = sum(math.prod(entry.shape) for entry in entries)
        same = have == sum(state[name].numel() for name in names)
    if not same and absent:  # some patterns are of quantised checkpoints alone, so absence is no fault yet
        raise CheckpointError(
            f"{first.file.parent} has only a part of {names[0]}: {first.name} is there, nothing is named"
            f" {some(absent)}: is the download incomplete?"
        )
    if not same:
        common, _ = Counter(entry.shape for entry in entries).most_common(1)[0]
        odd = next((entry for entry in entries if entry.shape != common), first)
        with_others = f", with {len(entries) - 1} others" if len(entries) > 1 else ""
        raise CheckpointError(
            f"{odd.file}, tensor {odd.name} has shape {odd.shape}; config.json asks for {wanted} in"
            f" {names[0]}{with_others}"
        )
