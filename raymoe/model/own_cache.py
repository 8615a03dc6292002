"""The cache that a model makes for itself, of one sequence: for layers that the packed cache can't hold.

Linear attention, convolutions and sparse attention with an index keep states of many shapes, some of them
overwritten in place. So that a forward that breaks off leaves nothing behind, such states are copied before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from raymoe.model.cache import capacity_for

_GROWN = ("keys", "values", "indexer_keys")
"""What layers of full attention only ever lengthen: cutting it to its old length undoes that."""


class OwnCache:
    """As `SequenceCache` to the scheduler. The model makes it in its first forward, which gets all the prompt."""

    def __init__(self) -> None:
        self.length = 0
        self.capacity = 0
        self._cache: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in it."""
        return sum(tensor.nbytes for tensor in _tensors(self._cache))

    def reserve(self, tokens: int) -> None:
        """Account for `tokens` in all; never shrinks."""
        if tokens > self.capacity:
            self.capacity = capacity_for(tokens)

    def release(self) -> None:
        """Forget everything and give the memory back."""
        self.length = self.capacity = 0
        self._cache = None

    @contextmanager
    def extending(self) -> Iterator[Any]:
        """Around a forward, which gets what this yields (None at first). If it raises, nothing has changed."""
        layers = [] if self._cache is None else _layers(self._cache)
        before = [_state(layer) for layer in layers]
        outside = {} if self._cache is None else {n: v for n, v in vars(self._cache).items() if n != "layers"}
        saved = _copy(outside)
        length = self.length
        try:
            yield self._cache
        except BaseException:
            if self._cache is not None:
                vars(self._cache).update(saved)
                for layer, state in zip(layers, before, strict=True):
                    _restore(layer, state, length)
            raise

    def extend(self, cache: Any, tokens: int) -> None:
        """The forward is complete: `cache` is what the model gave back, `tokens` longer."""
        self._cache = cache
        self.length += tokens
        self.reserve(self.length)


def _layers(cache: Any) -> list[Any]:
    return list(getattr(cache, "layers", ()))


def _grows(layer: Any) -> bool:
    return isinstance(layer, DynamicLayer) and not isinstance(layer, DynamicSlidingWindowLayer)


def _state(layer: Any) -> dict[str, Any]:
    """Copies of a layer's attributes, but of what is only lengthened."""
    skip = _GROWN if _grows(layer) else ()
    # A window's keys and values are replaced, never written to.
    shared = ("keys", "values") if isinstance(layer, DynamicSlidingWindowLayer) else ()
    return {
        name: value if name in shared else _copy(value)
        for name, value in vars(layer).items()
        if name not in skip
    }


def _restore(layer: Any, state: dict[str, Any], length: int) -> None:
    for name in _GROWN if _grows(layer) else ():
        grown = getattr(layer, name, None)
        if grown is not None and grown.dim() > 1:
            setattr(layer, name, grown[..., :length, :])
    vars(layer).update(state)


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(item) for item in value)
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin)):
        yield from _tensors(vars(value))
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
