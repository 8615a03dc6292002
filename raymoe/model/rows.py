"""Which rows of a step still count: those of a sequence that misses an expert are left out of the rest of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from raymoe.errors import EngineError, ExpertUnavailableError

# T rows of the step, in the order of its parts; N those that count


class LiveRows:
    """The rows of one step. `counts` says how many each part (sequence) has.

    `strict`: the step breaks off with the first missing expert. `padding` rows behind them belong to nobody.
    """

    def __init__(self, counts: Sequence[int], strict: bool, padding: int = 0) -> None:
        self._counts, self._strict, self._padding = counts, strict, padding
        self.lost: set[int] = set()
        """Numbers of the parts that are left out."""
        self.missing: ExpertUnavailableError | None = None
        """Why the first of them is."""
        self.index_N: torch.Tensor | None = None
        """int64 numbers of the rows that count, None while all do."""
        if padding:
            self.index_N = torch.arange(sum(counts))

    def lose(self, error: ExpertUnavailableError) -> None:
        """Leave out all rows of the parts whose rows `error` names, of all parts if it names none.

        `error.rows` are positions in `index_N`.

        Raises:
            ExpertUnavailableError: that one, if no part is left, or if the step is strict.
        """
        self.missing = self.missing or error
        part_T = np.repeat(np.arange(len(self._counts)), self._counts)
        part_N: NDArray[np.int64] = part_T if self.index_N is None else part_T[self.index_N.numpy()]
        self.lost |= set(part_N[list(error.rows)].tolist()) if error.rows else set(part_N.tolist())
        if self._strict or len(self.lost) == len(self._counts):
            raise error
        self.index_N = torch.from_numpy(np.flatnonzero(~np.isin(part_T, list(self.lost))))

    def check(self, rows: int) -> None:
        """Refuse a call that isn't for the rows of this step.

        Raises:
            EngineError: their numbers differ.
        """
        total = sum(self._counts) + self._padding
        if rows != total:
            raise EngineError(f"experts were called with {rows} rows in a step of {total}")
