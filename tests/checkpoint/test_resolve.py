from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import httpx2
import huggingface_hub.constants
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils._paths import filter_repo_objects

from raymoe.checkpoint import resolve as module
from raymoe.checkpoint.resolve import resolve
from raymoe.errors import CheckpointError


def no_hub(*_: object, **__: object) -> str:
    raise AssertionError("the Hub must not be asked")


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "snapshot_download", no_hub)
    assert resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "text", ["/no/such", "./no/such", "nowhere", "a/b/c", "~/nothing-here", "", "a/b@", "a@v1"]
)
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


class Hub:
    """In place of `snapshot_download`: gives or raises `cached` without the network and `remote` with it."""

    def __init__(self, cached: Path | Exception, remote: Path | Exception | None = None) -> None:
        self.cached, self.remote = cached, remote
        self.asked: list[tuple[str, str | None, bool]] = []

    def __call__(
        self,
        repo: str,
        *,
        revision: str | None,
        allow_patterns: list[str],
        ignore_patterns: list[str],
        local_files_only: bool,
    ) -> str:
        self.allow, self.ignore = allow_patterns, ignore_patterns
        self.asked.append((repo, revision, local_files_only))
        answer = self.cached if local_files_only else self.remote
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None, "the network must not be asked"
        return str(answer)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Hub]:
    def install(*answers: Path | Exception) -> Hub:
        made = Hub(*answers)
        monkeypatch.setattr(module, "snapshot_download", made)
        return made

    return install


def test_the_local_cache_comes_first(tiny_folder: Callable[[str], Path], hub: Callable[..., Hub]) -> None:
    made = hub(tiny_folder("olmoe"))
    assert resolve("someone/tiny") == tiny_folder("olmoe")
    assert made.asked == [("someone/tiny", None, True)]


def test_an_incomplete_cache_is_completed_from_the_hub(
    tmp_path: Path, tiny_folder: Callable[[str], Path], hub: Callable[..., Hub]
) -> None:
    made = hub(tmp_path, tiny_folder("olmoe"))
    assert resolve("someone/tiny@v1.2") == tiny_folder("olmoe")
    assert made.asked == [("someone/tiny", "v1.2", True), ("someone/tiny", "v1.2", False)]


def test_only_config_weights_and_tokenizer_are_downloaded(
    tiny_folder: Callable[[str], Path], hub: Callable[..., Hub]
) -> None:
    made = hub(tiny_folder("olmoe"))
    resolve("someone/tiny")
    wanted = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.model", "chat_template.jinja"]
    unwanted = [
        "pytorch_model.bin",
        "modeling_x.py",
        "original/params.json",
        "consolidated.safetensors",
        "a.gguf",
    ]
    files = filter_repo_objects([*wanted, *unwanted], allow_patterns=made.allow, ignore_patterns=made.ignore)
    assert list(files) == wanted


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OfflineModeIsEnabled("offline\nmode"), "HF_HUB_OFFLINE is set"),
        (LocalEntryNotFoundError("no\nnetwork"), "can't be reached; give a folder"),
        (httpx2.ReadTimeout("slow"), "can't be reached; give a folder"),
        (GatedRepoError("403\nforbidden", response=Mock()), "gated: accept its terms .* HF_TOKEN"),
        (RepositoryNotFoundError("404\nno", response=Mock()), "no such model, or it is private"),
        (RevisionNotFoundError("404\nno", response=Mock()), "no such revision"),
        (HfHubHTTPError("500\nserver\nerror", response=Mock()), "500 server error"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_keeps_a_model_from_being_downloaded_is_one_sentence(
    error: Exception, words: str, hub: Callable[..., Hub]
) -> None:
    hub(LocalEntryNotFoundError("not cached"), error)
    with pytest.raises(CheckpointError, match=f"someone/tiny is neither a folder nor .*{words}") as caught:
        resolve("someone/tiny")
    assert "\n" not in str(caught.value)


@pytest.fixture
def offline_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache of the library's own layout, empty, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_a_revision_of_the_cache_is_found_without_the_network(
    tiny_folder: Callable[[str], Path], offline_cache: Path
) -> None:
    for commit, architecture in ((40 * "a", "olmoe"), (40 * "b", "mixtral")):
        shutil.copytree(
            tiny_folder(architecture), offline_cache / "models--someone--tiny" / "snapshots" / commit
        )
    refs = offline_cache / "models--someone--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text(40 * "a")
    (refs / "v1").write_text(40 * "b")
    for text in ("someone/tiny@v1", "someone/tiny@" + 40 * "b"):
        assert json.loads((resolve(text) / "config.json").read_text())["model_type"] == "mixtral"
    assert json.loads((resolve("someone/tiny") / "config.json").read_text())["model_type"] == "olmoe"


def test_the_librarys_own_offline_mode_is_told_apart_from_a_hub_out_of_reach(offline_cache: Path) -> None:
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set; unset it, or give a folder"):
        resolve("someone/tiny")
