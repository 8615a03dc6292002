"""The check at the start passes where the promise holds, and names what breaks it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from raymoe.checkpoint.folder import Checkpoint
from raymoe.checkpoint.router import load_router
from raymoe.checkpoint.slices import ExpertLoader
from raymoe.errors import ConfigError
from raymoe.experts.kernels import kernel_for
from raymoe.model import invariant, invariant_check
from raymoe.model.attention import NAME
from raymoe.model.context import run_experts
from raymoe.model.forward import row_tile, set_row_tile
from raymoe.model.invariant_check import check_can_be_invariant, check_model, make_invariant, wanted_tile
from tests.tiny import tiny_config

Folder = Callable[[str], Path]


class Experts:
    """All experts in this process, each with the kernel of an expert group."""

    def __init__(self, folder: Path, deterministic: bool = True) -> None:
        loader = ExpertLoader(Checkpoint.open(folder))
        self._kernel = kernel_for(loader.experts_module(0, 1), deterministic)
        self._weights = []
        for layer in loader.model.layers:
            stacked = loader.load(layer.index, range(layer.experts))
            self._weights.append(
                [self._kernel.weights({k: t[e] for k, t in stacked.items()}) for e in range(layer.experts)]
            )

    def __call__(self, layer, hidden_TH, ids_TK, weights_TK):
        out_TH = torch.zeros_like(hidden_TH)
        for expert, weights in enumerate(self._weights[layer]):
            rows, slots = (ids_TK == expert).nonzero(as_tuple=True)
            if len(rows):
                out = self._kernel.alone(weights, hidden_TH[rows])
                out_TH.index_add_(0, rows, (out * weights_TK[rows, slots][:, None]).to(out_TH.dtype))
        return out_TH


def model_of(folder: Path):
    return load_router(Checkpoint.open(folder), run_experts, attention=NAME)


@pytest.mark.parametrize(
    ("model_type", "tile"), [("olmoe", 4), ("deepseek_v3", 4), ("gpt_oss", 4), ("qwen2_moe", 32)]
)
def test_a_deterministic_model_passes_with_whole_vectors_of_rows(tiny_folder: Folder, model_type, tile):
    folder = tiny_folder(model_type)
    model = model_of(folder)
    assert row_tile(model) == 1
    make_invariant(model, Experts(folder))
    assert row_tile(model) == tile
    assert wanted_tile(model, Experts(folder)) == tile


def test_the_normal_mode_is_refused_with_the_module_that_differs(tiny_folder: Folder):
    folder = tiny_folder("olmoe")
    with pytest.raises(ConfigError, match=r"can't be kept .*: model\.layers\.0\.\S+ \(\w+, 1 threads\)"):
        check_model(model_of(folder), Experts(folder))


def test_a_part_of_a_vector_is_noticed(tiny_folder: Folder):
    folder = tiny_folder("qwen2_moe")
    model = model_of(folder)
    set_row_tile(model, 4)
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp \(Qwen2MoeSparseMoeBlock"):
        check_model(model, Experts(folder))


def test_experts_that_know_their_company_are_noticed(tiny_folder: Folder):
    folder = tiny_folder("olmoe")
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.experts \(RemoteExperts"):
        make_invariant(model_of(folder), Experts(folder, deterministic=False))


def test_blocks_of_keys_whose_bits_depend_on_their_number_are_noticed(tiny_folder: Folder, monkeypatch):
    folder = tiny_folder("olmoe")
    monkeypatch.setattr(invariant, "BLOCK", 1 << 20)
    sum_values = invariant._sum_values

    def length_matters(shares, values):
        return sum_values(shares, values) * (1 + 1e-6 * (shares.shape[2] == 192))

    monkeypatch.setattr(invariant, "_sum_values", length_matters)
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.self_attn"):
        make_invariant(model_of(folder), Experts(folder))


def test_a_matrix_is_refused_with_its_shape(tiny_folder: Folder, monkeypatch):
    folder = tiny_folder("olmoe")

    def refuse(run, rows, what):
        raise ConfigError(what)

    monkeypatch.setattr(invariant_check, "check_rows", refuse)
    with pytest.raises(ConfigError, match=r"_proj \(\d+, 64\)"):
        make_invariant(model_of(folder), Experts(folder))


def test_models_with_states_of_their_own_are_refused_in_one_sentence():
    check_can_be_invariant(tiny_config("gpt_oss"))
    with pytest.raises(
        ConfigError, match=r"qwen3_next keeps other states.*set model\.deterministic to false"
    ):
        check_can_be_invariant(tiny_config("qwen3_next"))
