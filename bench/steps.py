"""One step of the benchmark model, in the ways that `bench dispatch` compares."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from raymoe.checkpoint.slices import ExpertLoader
from raymoe.dispatch.pieces import combine
from raymoe.experts.group import ExpertGroup
from raymoe.lanes.base import Request
from raymoe.lanes.header import Header, Kind
from raymoe.model.cache import SequenceCache
from raymoe.model.context import RunExperts
from raymoe.model.forward import Part, forward

CONTEXT = 64
"""Tokens that each sequence has behind it when a decode step is measured."""


def prompts(model: Any, sequences: int, length: int) -> Tensor:
    """The same random tokens everywhere, [sequences, length]."""
    return torch.randint(
        5, model.config.vocab_size, (sequences, length), generator=torch.Generator().manual_seed(length)
    )


class Step:
    """Something that can be done again and again, with the same result."""

    def run(self) -> Tensor:
        """Logits [sequences, V] of the last row of each."""
        raise RuntimeError("each kind of step has its own")

    def timed(self, repeats: int) -> float:
        """Seconds of one step, averaged over `repeats` after one that doesn't count."""
        self.run()
        start = time.perf_counter()
        for _ in range(repeats):
            self.run()
        return (time.perf_counter() - start) / repeats


class Packed(Step):
    """A step of raymoe's router; decodes start behind a context of 64 tokens each, again at every run."""

    def __init__(self, router: Any, experts: RunExperts, sequences: int, rows: int) -> None:
        self._router, self._experts, self._rows = router, experts, rows
        self._caches = [SequenceCache() for _ in range(sequences)]
        self._tokens = prompts(router, sequences, CONTEXT + rows).tolist()
        if rows == 1:
            for cache, tokens in zip(self._caches, self._tokens, strict=True):
                forward(router, [Part(cache, tokens[:-1], False)], experts)
        self._from = [cache.length for cache in self._caches]

    def run(self) -> Tensor:
        for cache, length in zip(self._caches, self._from, strict=True):
            cache.length = length
        parts = [Part(c, t[-self._rows :], True) for c, t in zip(self._caches, self._tokens, strict=True)]
        return forward(self._router, parts, self._experts)


class Library(Step):
    """The same step by transformers, as one padded batch with its own cache."""

    def __init__(self, model: Any, sequences: int, rows: int) -> None:
        self._model, self._rows = model, rows
        self._tokens = prompts(model, sequences, CONTEXT + rows)
        self._cache = DynamicCache(config=model.config)
        if rows == 1:
            with torch.inference_mode():
                model(self._tokens[:, :-1], cache=self._cache, use_cache=True, logits_to_keep=1)

    def run(self) -> Tensor:
        if self._rows > 1:
            self._cache = DynamicCache(config=self._model.config)
        with torch.inference_mode():
            out = self._model(
                self._tokens[:, -self._rows :], cache=self._cache, use_cache=True, logits_to_keep=1
            )
            if self._rows == 1:
                self._cache.crop(-1)
        return out.logits[:, -1]


class LocalExperts:
    """The experts in this process: what a router with its experts beside it would do, with our kernels."""

    def __init__(self, loader: ExpertLoader) -> None:
        self._group = ExpertGroup(loader, "local")
        for layer in loader.model.layers:
            self._group.load_slice(layer.index, range(layer.experts))

    def __call__(self, layer: int, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        tokens, top_k = ids.shape
        expert_P = ids.reshape(-1).numpy()
        order = np.argsort(expert_P, kind="stable")
        counts = np.bincount(expert_P)
        used = np.flatnonzero(counts)
        segments = np.stack([used, np.zeros_like(used), counts[used]], axis=1).astype(np.int32)
        pairs = len(order)
        header = Header(Kind.ROWS, 0, 0, layer, 0, tokens, pairs, len(used), 0, 0, 0)
        done = hidden.new_empty(pairs, hidden.shape[1])
        self._group.compute([Request(header, hidden, (order // top_k).astype(np.int32), segments, done)])
        out = torch.empty_like(done)
        out.index_copy_(0, torch.from_numpy(order), done)
        return combine(out.view(tokens, top_k, -1), weights, hidden.dtype)
