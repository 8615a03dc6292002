"""A router and expert slices together give the model's own logits. T tokens, K top-k, H hidden, P pairs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from raymoe.checkpoint.folder import Checkpoint
from raymoe.checkpoint.router import ExpertsFn, load_router
from raymoe.checkpoint.slices import ExpertLoader
from raymoe.policy.layout import even_slices
from tests.tiny import TINY_TYPES, tiny_checkpoint

TOKENS = torch.tensor([list(range(3, 43)), list(range(100, 140))])


def filled(loader: ExpertLoader, layer: int, experts: Sequence[int]) -> nn.Module:
    module = loader.experts_module(layer, len(experts))
    for name, tensor in loader.load(layer, experts).items():
        getattr(module, name).copy_(tensor)
    return module


def through(loader: ExpertLoader, groups: Sequence[Sequence[int]]) -> ExpertsFn:
    """Each group computes one unweighted row per pair; the sum goes over slots in order."""
    modules = [[filled(loader, layer.index, group) for group in groups] for layer in loader.model.layers]

    def experts(layer: int, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        T, K = ids_TK.shape
        ids_P, rows_PH = ids_TK.reshape(-1), hidden_TH.repeat_interleave(K, 0)
        out_PH = torch.full_like(rows_PH, torch.nan)
        for group, module in zip(groups, modules[layer], strict=True):
            for slot, expert in enumerate(group):
                mine = (ids_P == expert).nonzero()[:, 0]
                if len(mine):
                    slots_P1 = torch.full((len(mine), 1), slot)
                    out_PH[mine] = module(
                        rows_PH[mine], slots_P1, torch.ones_like(slots_P1, dtype=rows_PH.dtype)
                    )
        return (out_PH.view(T, K, -1) * weights_TK.unsqueeze(-1)).sum(1).to(hidden_TH.dtype)

    return experts


@torch.no_grad()
def full_logits(folder: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()(TOKENS).logits


def split_logits(folder: Path, groups: Sequence[Sequence[int]], dtype: torch.dtype | None = None) -> Tensor:
    checkpoint = Checkpoint.open(folder)
    router = load_router(checkpoint, through(ExpertLoader(checkpoint, dtype), groups), dtype=dtype)
    return router(TOKENS).logits


@pytest.mark.parametrize("model_type", TINY_TYPES)
def test_logits_through_slices_equal_the_full_model(
    model_type: str, tiny_folder: Callable[[str], Path]
) -> None:
    folder = tiny_folder(model_type)
    reference = full_logits(folder)
    for groups in (2, 3):
        difference = (split_logits(folder, even_slices(8, groups)) - reference).abs().max().item()
        assert difference <= 1e-5, f"{model_type} through {groups} slices: {difference}"


@pytest.mark.parametrize("model_type", TINY_TYPES)
def test_placement_does_not_change_a_bit(model_type: str, tiny_folder: Callable[[str], Path]) -> None:
    folder = tiny_folder(model_type)
    first = split_logits(folder, even_slices(8, 2))
    draw = random.Random(0)
    for _ in range(3):
        order = draw.sample(range(8), 8)
        cut = draw.randint(1, 7)
        assert torch.equal(split_logits(folder, [order[:cut], order[cut:]]), first)


def test_a_wrong_expert_shows_in_the_logits(tiny_folder: Callable[[str], Path]) -> None:
    folder = tiny_folder("olmoe")
    checkpoint = Checkpoint.open(folder)
    experts = through(ExpertLoader(checkpoint), [range(8)])
    swapped = load_router(checkpoint, lambda i, h, ids, w: experts(i, h, (ids + 1) % 8, w))
    assert (swapped(TOKENS).logits - full_logits(folder)).abs().max() > 1e-2


def test_bfloat16_equals_the_full_model_in_bfloat16(tiny_folder: Callable[[str], Path]) -> None:
    folder = tiny_folder("deepseek_v3")
    split = split_logits(folder, even_slices(8, 3), torch.bfloat16)
    assert split.dtype == torch.bfloat16
    assert torch.equal(split, full_logits(folder, torch.bfloat16))


def test_dense_layers_between_moe_layers_and_many_shards(tmp_path: Path) -> None:
    tiny_checkpoint(
        "qwen3_moe", tmp_path, num_hidden_layers=5, mlp_only_layers=[1, 3], max_shard_size="100KB"
    )
    assert len(list(tmp_path.glob("*.safetensors"))) > 5
    model = ExpertLoader(Checkpoint.open(tmp_path)).model
    assert [(layer.index, layer.name) for layer in model.layers] == [
        (i, f"model.layers.{n}.mlp.experts") for i, n in enumerate((0, 2, 4))
    ]
    assert (split_logits(tmp_path, even_slices(8, 3)) - full_logits(tmp_path)).abs().max() <= 1e-5


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    tiny_checkpoint("qwen3_moe", tmp_path, tie_word_embeddings=True)
    checkpoint = Checkpoint.open(tmp_path)
    assert "lm_head.weight" not in checkpoint.tensors
    router = load_router(checkpoint, through(ExpertLoader(checkpoint), [range(8)]))
    assert router.lm_head.weight is router.model.embed_tokens.weight
    assert (router(TOKENS).logits - full_logits(tmp_path)).abs().max() <= 1e-5


def test_generate_works_on_the_router(tiny_folder: Callable[[str], Path]) -> None:
    folder = tiny_folder("qwen2_moe")
    checkpoint = Checkpoint.open(folder)
    router = load_router(checkpoint, through(ExpertLoader(checkpoint), even_slices(8, 3)))
    full = AutoModelForCausalLM.from_pretrained(folder).eval()
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(TOKENS)}
    assert torch.equal(router.generate(TOKENS, **options), full.generate(TOKENS, **options))
    assert router.generation_config.eos_token_id == 258
