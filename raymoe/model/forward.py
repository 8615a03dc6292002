"""One packed forward of a router's model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from raymoe.model.cache import PackedCache, Part, SequenceCache
from raymoe.model.context import RunExperts, StepContext, step


class PackedModel:
    """A router's model, called with row lists instead of batches.

    `model` was loaded with `attention=attention.NAME` and `experts=context.run_experts`.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        config = model.config.get_text_config()
        self._separate = getattr(config, "kv_lora_rank", None) is None

    def forward(
        self,
        rows: Sequence[tuple[SequenceCache, Sequence[int]]],
        sampling: Sequence[int],
        experts: RunExperts,
    ) -> Tensor:
        """Compute the new tokens of each sequence; logits [len(sampling), V] of the parts in `sampling`.

        A part's logits are those of its last row. The caches count the new tokens only if all went well.

        Raises:
            ExpertUnavailableError: from `experts`; the caches are as before.
        """
        parts = [Part(cache, len(tokens)) for cache, tokens in rows]
        ids = [token for _, tokens in rows for token in tokens]
        positions = [n for part in parts for n in range(part.cache.length, part.cache.length + part.rows)]
        ends: list[int] = []
        for part in parts:
            ends.append((ends[-1] + 1 if ends else 0) + part.rows - 1)
        cache = PackedCache(parts, self._separate)
        with torch.inference_mode(), step(StepContext(cache, experts)):
            out = self.model(
                input_ids=torch.tensor([ids]),
                position_ids=torch.tensor([positions]),
                cache=cache,
                use_cache=False,
                logits_to_keep=torch.tensor([ends[number] for number in sampling], dtype=torch.long),
            )
        cache.commit()
        return out.logits[0]
