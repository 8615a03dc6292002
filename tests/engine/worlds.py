"""Expert groups of a tiny checkpoint in this process, placed at random, that answer late and can be replaced."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raymoe.checkpoint.folder import Checkpoint
from raymoe.checkpoint.router import load_router
from raymoe.checkpoint.slices import ExpertLoader
from raymoe.dispatch.dispatcher import Dispatcher
from raymoe.engine.loop import Engine, Event
from raymoe.engine.scheduler import Chunk, Limits
from raymoe.experts.group import ExpertGroup
from raymoe.experts.serve import GroupServer
from raymoe.lanes.hello import Hello
from raymoe.lanes.inproc import inproc_pair
from raymoe.model.attention import NAME
from raymoe.model.context import run_experts
from raymoe.model.forward import set_row_tile
from raymoe.model.invariant_check import wanted_tile
from raymoe.policy.layout import Copy, GroupPlace, Layout

LATEST_S = 0.001


@cache
def model_of(folder: Path, deterministic: bool) -> Any:
    """The router's model in one of the two modes."""
    model = load_router(Checkpoint.open(folder), run_experts, attention=NAME)
    if deterministic:
        set_row_tile(model, wanted_tile(model, lambda layer, hidden, ids, weights: torch.zeros_like(hidden)))
    return model


@cache
def loader_of(folder: Path) -> ExpertLoader:
    return ExpertLoader(Checkpoint.open(folder))


class World:
    """`groups` expert groups; each expert has a copy in one of them, and each further copy with `chance`."""

    def __init__(
        self, folder: Path, rng: random.Random, groups: int, chance: float, deterministic: bool
    ) -> None:
        self._loader, self._rng, self._deterministic = loader_of(folder), rng, deterministic
        self.servers: dict[str, GroupServer] = {}
        self._slices: dict[str, list[list[int]]] = {}
        self._places: dict[str, list[dict[int, tuple[int, int]]]] = {}
        self._routers: list[Dispatcher] = []
        self._epoch = -1
        names = [f"g{number}" for number in range(groups)]
        slices: dict[str, list[list[int]]] = {name: [] for name in names}
        for layer in self._loader.model.layers:
            held: dict[str, list[int]] = {name: [] for name in names}
            for expert in range(layer.experts):
                first = rng.choice(names)
                for name in names:
                    if name == first or rng.random() < chance:
                        held[name].append(expert)
            for name in names:
                rng.shuffle(held[name])
                slices[name].append(held[name])
        for name in names:
            self._start(name, slices[name])

    def _start(self, name: str, slices: list[list[int]]) -> None:
        group = ExpertGroup(self._loader, name, self._deterministic)
        self._places[name] = [
            dict(zip(experts, group.load_slice(layer, experts), strict=True)) if experts else {}
            for layer, experts in enumerate(slices)
        ]
        compute, rng = group.compute, random.Random(self._rng.random())

        def late(requests: Any) -> None:
            time.sleep(rng.random() * LATEST_S)
            compute(requests)

        group.compute = late  # type: ignore[method-assign]
        self._slices[name] = slices
        self.servers[name] = GroupServer(group, Hello("secret", "f", "float32", 64), threads=1)
        self.servers[name].start()

    def layout(self) -> Layout:
        """The groups as they are, with the next epoch."""
        self._epoch += 1
        layers = []
        for index, layer in enumerate(self._loader.model.layers):
            experts: list[tuple[Copy, ...]] = []
            for expert in range(layer.experts):
                homes = [(name, places[index].get(expert)) for name, places in self._places.items()]
                experts.append(tuple(Copy(name, *place) for name, place in homes if place is not None))
            layers.append(tuple(experts))
        places = tuple(GroupPlace(name, server.address) for name, server in self.servers.items())
        return Layout(self._epoch, places, tuple(layers))

    def lose(self, name: str) -> None:
        """End a group; its name stays in the layout until `replace`."""
        self.servers.pop(name).stop()

    def replace(self, name: str) -> None:
        """Start another group with the slice of a lost one."""
        del self._places[name]
        self._start(f"{name}r", self._slices[name])

    def router(self, max_pairs: int = 4096) -> Dispatcher:
        """A dispatcher with lanes of its own."""

        def connect(place: GroupPlace) -> Any:
            router, group = inproc_pair(place.name, max_pairs)
            self.servers[place.name].add_lane(group)
            return router

        self._routers.append(Dispatcher(connect, silence_s=30))
        return self._routers[-1]

    def close(self) -> None:
        for router in self._routers:
            router.close()
        for server in self.servers.values():
            server.stop()


@contextlib.contextmanager
def world(
    folder: Path, seed: int, groups: int = 2, chance: float = 0.3, deterministic: bool = True
) -> Iterator[World]:
    """A world that ends with the block."""
    made = World(folder, random.Random(seed), groups, chance, deterministic)
    try:
        yield made
    finally:
        made.close()


class RecordingEngine(Engine):
    """Keeps the bytes of the logits that each token was chosen from, by request."""

    def __init__(self, folder: Path, experts: Dispatcher, deterministic: bool = True, **limits: int) -> None:
        values = {"step_tokens": 64, "max_sequences": 8, "max_waiting": 32, "kv_tokens": 4096, **limits}
        model = model_of(folder, deterministic)
        super().__init__(model, experts, Limits(**values), replace_timeout_s=60)
        self.bits: dict[str, list[bytes]] = {}

    def _postprocess(self, chunks: list[Chunk], logits: Tensor) -> list[Event]:
        sampled = [chunk.sequence for chunk in chunks if chunk.sequence.pending == 0]
        for sequence, row in zip(sampled, logits, strict=True):
            self.bits.setdefault(sequence.id, []).append(bytes(row.contiguous().view(torch.uint8).numpy()))
        return super()._postprocess(chunks, logits)
