"""Fixtures for all tests: tiny checkpoints, written once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.tiny import tiny_checkpoint


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """References are computed as expert groups compute: with one thread, since more may round otherwise."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`tiny_folder("olmoe")` is a shared tiny checkpoint of that type: read it, don't change it."""
    written: dict[str, Path] = {}

    def folder(model_type: str) -> Path:
        if model_type not in written:
            written[model_type] = tiny_checkpoint(model_type, tmp_path_factory.mktemp(model_type))
        return written[model_type]

    return folder
