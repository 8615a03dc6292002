"""Settings to a Serve application, without starting one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from raymoe.actors.app import build_app, prepare
from raymoe.config import Settings
from raymoe.errors import ConfigError, MemoryLimitError


def test_spec_says_what_all_parts_agree_on(tiny_folder: Callable[[str], Path]) -> None:
    folder = tiny_folder("olmoe")
    spec = prepare(Settings.build({"model": {"path": str(folder), "name": "small"}}))
    assert (spec.path, spec.model_name, spec.dtype) == (str(folder.resolve()), "small", "float32")
    assert spec.settings.model.name == "small"
    assert spec.experts_per_layer == (8, 8, 8)
    # gate, up and down of 8 experts in 3 layers, hidden 64, width 48, 4 bytes.
    assert spec.expert_bytes == 3 * 8 * 3 * 64 * 48 * 4
    again = prepare(Settings.build({"model": {"path": str(folder)}}))
    assert again.generation != spec.generation and again.token != spec.token
    assert spec.token not in repr(spec)


def test_memory_is_checked_against_what_there_is(tiny_folder: Callable[[str], Path]) -> None:
    settings = Settings.build({"model": {"path": str(tiny_folder("olmoe"))}})
    with pytest.raises(MemoryLimitError, match="1 MiB are available"):
        prepare(settings, available=1 << 20)
    prepare(settings, available=0)


def test_models_that_can_not_be_deterministic_are_refused_before_anything_starts(
    tiny_folder: Callable[[str], Path],
) -> None:
    values = {"model": {"path": str(tiny_folder("qwen3_next")), "deterministic": True}}
    with pytest.raises(ConfigError, match="qwen3_next keeps other states"):
        prepare(Settings.build(values), available=0)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"grops": {}}, "unknown setting grops"),
        ({"groups": {"cuont": 2}}, "accepted here: count"),
        ({"server": {"port": 80}}, "http_options.port"),
    ],
)
def test_serve_files_args_are_refused_by_name(args: dict[str, dict[str, int]], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build_app(args)
