"""Every Mixture-of-Experts architecture of the pinned transformers: what stands for it, or why nothing does.

T tokens, K top-k, H width of the rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from raymoe.checkpoint.folder import Checkpoint
from raymoe.checkpoint.router import load_router
from raymoe.checkpoint.slices import ExpertLoader
from raymoe.dispatch.dispatcher import Dispatcher
from raymoe.experts.group import ExpertGroup
from raymoe.experts.serve import GroupServer
from raymoe.lanes.hello import Hello
from raymoe.lanes.inproc import InprocRouterLane, inproc_pair
from raymoe.policy.layout import Copy, GroupPlace, Layout

_OWN_NAME = """
afmoe axk1 axk2 bailing_hybrid beam cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 dots1
ernie4_5_moe exaone_moe flex_olmo flint glm4_moe glm4_moe_lite glm_moe_dsa gpt_oss granitemoe granitemoe_swa
granitemoehybrid granitemoeshared hunyuan_v1_moe hy_v3 hy_v4 jamba kimi_linear kolibri1 laguna lara_mini
lfm2_moe longcat_flash mellum mimo_v2_flash minimax minimax_m2 mistral4 mixtral nemotron_h olmoe phimoe
qwen2_moe qwen3_moe qwen3_next solar_open zaya
"""
_WITH_TEXT = (
    "aria dots3_note gemma4 inkling inkling2 inkling2_loop llama4 minimax_m3_vl qwen3_5_moe qwen4_exp"
)
SERVED = {name: name for name in _OWN_NAME.split()} | {name: f"{name}_text" for name in _WITH_TEXT.split()}
"""Directory below transformers/models → the model type whose tiny checkpoint stands for it."""

MATRIX_TYPES = tuple(sorted(SERVED.values()))

_NO_CLASS = "transformers has no AutoModelForCausalLM class for it, only one that takes images"
REFUSED: dict[str, str] = {
    "dbrx": "all experts of a layer are rows of the same matrices",
    "deepseek_ocr2": _NO_CLASS,
    "diffusion_gemma": "a diffusion model: it doesn't write token by token",
    "doge": "experts are rows of an embedding",
    "ernie4_5_vl_moe": _NO_CLASS + ", and one list of experts is split between text and images",
    "glm4v_moe": _NO_CLASS,
    "glm5_next": _NO_CLASS,
    "hy_v4_vl": _NO_CLASS,
    "jetmoe": "attention is made of experts too",
    "mistral_large4": _NO_CLASS,
    "muse_spark": _NO_CLASS + ", and it normalises after each expert",
    "nllb_moe": "an encoder-decoder",
    "openai_privacy_filter": "a classifier of tokens",
    "qwen3_omni_moe": _NO_CLASS,
    "qwen3_vl_moe": _NO_CLASS,
    "step3p7": _NO_CLASS,
    "switch_transformers": "an encoder-decoder",
    "unlimited_ocr": _NO_CLASS,
    "vitpose_backbone": "a model of images alone",
}
"""Directory → why no tiny checkpoint stands for it."""

TOKENS = torch.tensor([list(range(3, 43)), list(range(100, 140))])


@torch.no_grad()
def full_logits(folder: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    """What transformers' own model computes from the folder, all experts in it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()(TOKENS).logits


@contextlib.contextmanager
def split_model(
    folder: Path, slices: Sequence[Sequence[int]], dtype: torch.dtype | None = None
) -> Iterator[PreTrainedModel]:
    """The folder's router, its experts in serving groups that hold `slices`, behind lanes and dispatcher."""
    with served_experts(folder, slices, dtype) as dispatcher:
        yield load_router(Checkpoint.open(folder), dispatcher.run, dtype=dtype)


@contextlib.contextmanager
def served_experts(
    folder: Path, slices: Sequence[Sequence[int]], dtype: torch.dtype | None = None
) -> Iterator[Dispatcher]:
    """A dispatcher to serving groups that hold `slices` of every layer."""
    checkpoint = Checkpoint.open(folder)
    loader = ExpertLoader(checkpoint, dtype)
    moe = loader.model
    hello = Hello("secret", checkpoint.fingerprint, str(moe.dtype), moe.hidden_size)
    servers: dict[str, GroupServer] = {}
    copies: list[list[tuple[Copy, ...]]] = [[()] * layer.experts for layer in moe.layers]
    for number, experts in enumerate(slices):
        group = ExpertGroup(loader, f"g{number}")
        for layer in range(len(moe.layers)):
            for expert, place in zip(experts, group.load_slice(layer, experts), strict=True):
                copies[layer][expert] += (Copy(group.name, *place),)
        servers[group.name] = GroupServer(group, hello, threads=1)
        servers[group.name].start()

    def connect(place: GroupPlace) -> InprocRouterLane:
        ours, theirs = inproc_pair(place.name)
        servers[place.name].add_lane(theirs)
        return ours

    dispatcher = Dispatcher(connect, silence_s=30)
    try:
        places = tuple(GroupPlace(name, server.address) for name, server in servers.items())
        dispatcher.set_layout(Layout(0, places, tuple(map(tuple, copies))))
        yield dispatcher
    finally:
        dispatcher.close()
        for server in servers.values():
            server.stop()
