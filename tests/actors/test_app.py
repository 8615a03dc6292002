"""Settings to a Serve application, without starting one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from raymoe.actors.app import build_app, prepare
from raymoe.api.keys import new_key
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
    ("server", "text"),
    [
        ({"tls_cert": "absent"}, "belong together"),
        ({"keys_file": "absent"}, r"/absent can't be read"),
        ({"keys": {"alice": "secret"}}, "server.keys alice: behind the label"),
    ],
)
def test_files_of_keys_and_tls_are_looked_at_before_the_model(server: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        prepare(Settings.build({"server": server, "model": {"path": "not/looked/at"}}))


def test_paths_become_absolute_and_links_stay_links(
    tiny_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys.1"
    file.touch(0o600)
    file.write_text(new_key("alice")[1])
    (tmp_path / "keys").symlink_to(file)
    monkeypatch.chdir(tmp_path)
    values = {"server": {"keys_file": "keys"}, "model": {"path": str(tiny_folder("olmoe"))}}
    assert prepare(Settings.build(values)).settings.server.keys_file == str(tmp_path / "keys")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"grops": {}}, "unknown setting grops"),
        ({"groups": {"cuont": 2}}, "accepted here: count"),
        ({"server": {"port": 80}}, "http_options.port"),
        ({"server": {"tls_key": "x"}}, "http_options.ssl_keyfile"),
    ],
)
def test_serve_files_args_are_refused_by_name(args: dict[str, dict[str, int]], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        build_app(args)
