"""Tries, at the start of a batch-invariant router, whether its model keeps the promise on this machine.

Shape letters: T rows of a forward, H their width.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from raymoe.checkpoint.memory import give_back
from raymoe.errors import ConfigError
from raymoe.model.attention import can_pack
from raymoe.model.cache import SequenceCache
from raymoe.model.context import RunExperts
from raymoe.model.forward import Part, forward, row_tile, set_row_tile
from raymoe.model.row_check import ROWS_TRIED, check_rows, random_rows
from raymoe.model.vector_ends import fitting_tile
from raymoe.policy.tiles import KEYS, ROWS, tiled

TOKENS = 293
"""Length of the sequence that is tried: more than a block of keys, and it leaves three threads uneven shares."""
_COMPANY = 5
_WIDE = 16
"""Outputs from which on a matrix's layout doesn't matter to bits."""
_LARGE = 1 << 24
"""A matrix of more elements (the LM head) is tried with 64 rows."""


def check_can_be_invariant(config: PretrainedConfig) -> None:
    """Refuse models whose caches are their own.

    Raises:
        ConfigError: in one sentence.
    """
    if not can_pack(config):
        raise ConfigError(
            f"model.deterministic is for models with full or sliding attention; {config.model_type} keeps other"
            " states, whose bits depend on how its prompts are cut: set model.deterministic to false"
        )


def make_invariant(model: PreTrainedModel, experts: RunExperts) -> None:
    """Give the model its tile of rows and the layout of weights that is fastest for few rows, and check it.

    Raises:
        ConfigError, ExpertUnavailableError: as `check_model`.
    """
    set_row_tile(model, wanted_tile(model, experts))
    _lay_out(model)
    check_model(model, experts)
    # Old layouts and what was tried leave holes: 98 MB were measured with matrices of 150 MB, and 17 MB after this.
    give_back()


def _lay_out(model: PreTrainedModel) -> None:
    """A matrix whose columns lie together takes 0.85 to 1.0 of the time in fp32, at 4 rows.

    Embeddings stay. So do narrow matrices: with fewer than 12 columns, a row's place would change its bits.
    """
    ends = {id(end.weight) for end in (model.get_input_embeddings(), model.get_output_embeddings())}
    for module in model.modules():
        if not isinstance(module, nn.Linear) or id(module.weight) in ends or module.out_features < _WIDE:
            continue
        if module.weight.dtype == torch.float32 and module.weight.is_contiguous():
            module.weight.data = module.weight.data.t().contiguous().t()


def wanted_tile(model: PreTrainedModel, experts: RunExperts) -> int:
    """The rows that a step of this model must be a multiple of; see `vector_ends`. Leaves the model with `ROWS`."""
    set_row_tile(model, ROWS)
    return fitting_tile(lambda: forward(model, [Part(SequenceCache(), [0] * ROWS, True)], experts))


def check_model(model: PreTrainedModel, experts: RunExperts) -> None:
    """Try each shape of matrix alone, then the whole model: one sequence computed at once and alone, and again in
    pieces and in company. Every module must give it the same bits.

    Raises:
        ConfigError: names the first module that doesn't.
        ExpertUnavailableError: as `forward`.
    """
    matrices = {
        tuple(module.weight.shape): (name, module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear
    }
    for shape, (name, module) in matrices.items():
        tried = ROWS_TRIED if module.weight.numel() <= _LARGE else 64
        check_rows(module, random_rows(shape[1], module.weight.dtype, tried), f"{name} {shape}")
    length = min(TOKENS, model.config.get_text_config().max_position_embeddings)
    # In each tile of keys one decode, one piece that ends there, and one that begins there and ends in the next.
    cuts = [tile + cut for tile in range(0, length, KEYS) for cut in (20, 21, 50) if tile + cut < length]
    pieces = list(zip([0, *cuts], [*cuts, length], strict=True))
    with _recording(model) as alone:
        _run(model, experts, [(0, length)], 0, alone)
    with _recording(model) as together:
        _run(model, experts, pieces, _COMPANY, together)
    for (name, call), rows in alone.rows.items():
        others = together.rows[name, call]
        # An output that has a row for each key, as in MLA, may have as many rows as a step by chance.
        if len(others) == len(pieces) * len(rows) and not torch.equal(torch.cat(rows), torch.cat(others)):
            raise ConfigError(
                f"model.deterministic can't be kept on this machine: {name} ({alone.kinds[name]},"
                f" {torch.get_num_threads()} threads) gives a sequence of {length} tokens other bits in company or"
                " in pieces; set model.deterministic to false, or change router.threads"
            )


class _Recorder:
    """What each module gave for the rows of one sequence, call by call, as digests."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
        self.kinds: dict[str, str] = {}
        self.part, self.total = slice(0, 0), 0
        self.calls: Counter[str] = Counter()

    def begin(self, part: slice, total: int) -> None:
        """Before each forward: `part` is where the sequence's rows are among the `total` ones, with padding."""
        self.part, self.total = part, total
        self.calls.clear()

    def take(self, name: str, module: nn.Module, output: Any) -> None:
        """Keep the rows of an output that has one for each row of the step."""
        first = output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor):
            return
        rows = first[0] if first.dim() > 2 and first.shape[0] == 1 else first
        if len(rows) == self.total:
            # Some modules are called several times in a forward.
            self.calls[name] += 1
            self.rows[name, self.calls[name]].append(_digests(rows[self.part]))
            self.kinds[name] = type(module).__name__


def _digests(rows: Tensor) -> Tensor:
    """[T] int64, one for the bytes of each row: whole outputs of all modules would not fit."""
    bytes_TB = rows.reshape(len(rows), -1).contiguous().view(torch.uint8).long()
    weights_B = torch.randint(1 << 40, (bytes_TB.shape[1],), generator=torch.Generator().manual_seed(0))
    return (bytes_TB * weights_B).sum(1)


@contextlib.contextmanager
def _recording(model: PreTrainedModel) -> Iterator[_Recorder]:
    recorder = _Recorder()

    def hook(name: str) -> Any:
        return lambda module, _, output: recorder.take(name, module, output)

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name]
    try:
        yield recorder
    finally:
        for handle in handles:
            handle.remove()


def _run(
    model: PreTrainedModel,
    experts: RunExperts,
    pieces: Sequence[tuple[int, int]],
    company: int,
    recorder: _Recorder,
) -> None:
    tokens = torch.randint(
        model.config.get_text_config().vocab_size,
        (pieces[-1][1],),
        generator=torch.Generator().manual_seed(0),
    ).tolist()
    cache = SequenceCache()
    for start, end in pieces:
        parts = [Part(SequenceCache(), tokens[:company], True)] if company else []
        rows = company + end - start
        recorder.begin(slice(company, rows), tiled(rows, row_tile(model)))
        forward(model, [*parts, Part(cache, tokens[start:end], True)], experts)
