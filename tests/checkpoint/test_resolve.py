from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

from raymoe.checkpoint import resolve as module
from raymoe.checkpoint.resolve import resolve
from raymoe.errors import CheckpointError


def no_hub(*_: object, **__: object) -> str:
    raise AssertionError("the Hub must not be asked")


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "snapshot_download", no_hub)
    assert resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("text", ["/no/such", "./no/such", "nowhere", "a/b/c", "~/nothing-here", ""])
def test_what_looks_like_a_path_is_not_looked_up_on_the_hub(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "snapshot_download", no_hub)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="there is no folder"):
        resolve(text)


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="is a file; a model is a folder"):
        resolve(str(tmp_path / "model.safetensors"))


def test_a_malformed_id_is_refused() -> None:
    with pytest.raises(CheckpointError, match="neither a folder nor a Hugging Face id"):
        resolve("who/what?!")


def test_the_local_cache_comes_first(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def cached(repo: str, allow_patterns: list[str], local_files_only: bool = False) -> str:
        asked.append(local_files_only)
        return str(tiny_folder("olmoe"))

    monkeypatch.setattr(module, "snapshot_download", cached)
    assert resolve("someone/tiny") == tiny_folder("olmoe")
    assert asked == [True]


def test_an_incomplete_cache_is_completed_from_the_hub(
    tmp_path: Path, tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot(repo: str, allow_patterns: list[str], local_files_only: bool = False) -> str:
        assert not {"*.bin", "*.py", "*"} & set(allow_patterns)
        return str(tmp_path if local_files_only else tiny_folder("olmoe"))

    monkeypatch.setattr(module, "snapshot_download", snapshot)
    assert resolve("someone/tiny") == tiny_folder("olmoe")


def test_a_hub_out_of_reach_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(repo: str, allow_patterns: list[str], local_files_only: bool = False) -> str:
        raise (
            LocalEntryNotFoundError("not cached")
            if local_files_only
            else OfflineModeIsEnabled("offline\nmode")
        )

    monkeypatch.setattr(module, "snapshot_download", offline)
    with pytest.raises(
        CheckpointError, match=r"someone/tiny is neither a folder nor .* offline mode"
    ) as caught:
        resolve("someone/tiny")
    assert "\n" not in str(caught.value)
