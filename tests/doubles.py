"""Test doubles that several packages share: experts in memory, and groups that serve them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import torch
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from raymoe.experts.group import ExpertGroup
from raymoe.experts.serve import GroupServer
from raymoe.lanes.hello import Hello
from raymoe.lanes.inproc import inproc_pair
from raymoe.policy.layout import Copy, GroupPlace, Layout, even_layout, even_slices

HIDDEN, EXPERTS, TOP_K = 32, 8, 2
HELLO = Hello(token="secret", fingerprint="f", dtype="float32", hidden_size=HIDDEN)


def experts_module(kind: str = "qwen3_moe", experts: int = EXPERTS, seed: int = 0) -> torch.nn.Module:
    """A full experts module of a real architecture with random weights."""
    if kind == "gpt_oss":
        config = GptOssConfig(hidden_size=HIDDEN, intermediate_size=16, num_local_experts=experts)
        module = GptOssExperts(config)
    else:
        config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=16, num_experts=experts)
        module = Qwen3MoeExperts(config)
    config._experts_implementation = "grouped_mm"
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return module.requires_grad_(False)


class MemoryLoader:
    """Stands for `checkpoint.slices.ExpertLoader`: the experts are in memory."""

    def __init__(self, layers: int = 2, kind: str = "qwen3_moe") -> None:
        self.modules = [experts_module(kind, seed=layer) for layer in range(layers)]
        self.model = SimpleNamespace(layers=tuple(SimpleNamespace(experts=EXPERTS) for _ in range(layers)))

    def experts_module(self, layer: int, slots: int) -> torch.nn.Module:
        return self.modules[layer]

    def load(self, layer: int, experts: Sequence[int], on_bytes=None) -> dict[str, torch.Tensor]:
        named = dict(self.modules[layer].named_parameters())
        return {name: parameter[list(experts)] for name, parameter in named.items()}


class Cluster:
    """Expert groups in this process, each with its serve thread, and the layout that names them."""

    def __init__(self, slices: Sequence[Sequence[int]], loader: MemoryLoader | None = None) -> None:
        self.loader = loader or MemoryLoader()
        self.servers: dict[str, GroupServer] = {}
        copies: list[list[list[Copy]]] = [[[] for _ in range(EXPERTS)] for _ in self.loader.modules]
        for number, experts in enumerate(slices):
            group = ExpertGroup(self.loader, f"g{number}")
            for layer in range(len(self.loader.modules)):
                places = group.load_slice(layer, experts)
                for expert, (slot, generation) in zip(experts, places, strict=True):
                    copies[layer][expert].append(Copy(group.name, slot, generation))
            self.servers[group.name] = GroupServer(group, HELLO, threads=1)
            self.servers[group.name].start()
        places = tuple(GroupPlace(name, server.address) for name, server in self.servers.items())
        self.layout = Layout(0, places, tuple(tuple(map(tuple, layer)) for layer in copies))

    def connect(self, place: GroupPlace, max_pairs: int = 4096):
        router, group = inproc_pair(place.name, max_pairs)
        self.servers[place.name].add_lane(group)
        return router

    def expected(self, layer: int, hidden, ids, weights) -> torch.Tensor:
        """What transformers' own module computes."""
        return self.loader.modules[layer](hidden, ids, weights)

    def close(self) -> None:
        for server in self.servers.values():
            server.stop()


@contextlib.contextmanager
def cluster(
    slices: Sequence[Sequence[int]] | int = 2, loader: MemoryLoader | None = None
) -> Iterator[Cluster]:
    """Groups with these experts each; a number means that many even slices."""
    made = Cluster(even_slices(EXPERTS, slices) if isinstance(slices, int) else slices, loader)
    try:
        yield made
    finally:
        made.close()


def routed(tokens: int, seed: int = 0, top_k: int = TOP_K, dtype=torch.float32):
    """Random (hidden_TH, ids_TK, weights_TK) as a gate would give them."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, generator=generator, dtype=dtype)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:top_k] for _ in range(tokens)])
    return hidden, ids, torch.rand(tokens, top_k, generator=generator, dtype=dtype)


__all__ = ["Cluster", "MemoryLoader", "cluster", "even_layout", "experts_module", "routed"]
