"""Whether a computation gives a row the same bits in any company: tried on this machine, not assumed.

Shape letters: T rows, H their width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from raymoe.errors import ConfigError
from raymoe.policy.tiles import ROWS

ROWS_TRIED = 512
"""Rows of the largest product that is tried; the others have all multiples of a tile up to 64, and some more."""


def random_rows(width: int, dtype: torch.dtype, rows: int = ROWS_TRIED) -> Tensor:
    """[T, H], the same at each call."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(width)).to(dtype)


@torch.inference_mode()
def check_rows(run: Callable[[Tensor], Tensor], rows_TH: Tensor, what: str, tile: int = ROWS) -> None:
    """Compare each row's results among all rows with those among fewer, and in other places.

    `tile`: `run` is only asked for multiples of it; 1 if it pads its rows itself.

    Raises:
        ConfigError: they differ; names `what` and the numbers of rows.
    """
    total = len(rows_TH)
    expected = run(rows_TH)
    if not torch.equal(run(rows_TH.flip(0)).flip(0), expected):
        raise ConfigError(_refusal(what, rows_TH, f"depend on a row's place among {total}"))
    counts = [n for n in (*range(tile, 65, tile), 100, 128, 200, 256, 384) if n < total]
    for count in counts:
        for start in (0, total - count):
            part = slice(start, start + count)
            if not torch.equal(run(rows_TH[part]), expected[part]):
                raise ConfigError(_refusal(what, rows_TH, f"differ between {count} and {total} rows"))


def _refusal(what: str, rows_TH: Tensor, how: str) -> str:
    return (
        f"model.deterministic can't be kept on this machine: the results of {what} (rows of {rows_TH.shape[1]}"
        f" {str(rows_TH.dtype).removeprefix('torch.')}, {torch.get_num_threads()} threads) {how};"
        " set model.deterministic to false, or change groups.threads and router.threads"
    )
