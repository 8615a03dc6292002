from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from raymoe.checkpoint.tensors import LazyTensor, read_header
from raymoe.errors import CheckpointError


def written(folder: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors, folder / "a.safetensors")
    return folder / "a.safetensors"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_reading_gives_the_saved_values(tmp_path: Path, dtype: torch.dtype) -> None:
    value = (torch.arange(24).view(4, 3, 2) % 5).to(dtype)
    _, entries = read_header(written(tmp_path, pad=torch.zeros(3, dtype=torch.uint8), x=value))
    assert torch.equal(LazyTensor(entries["x"])[...], value)


def test_rows_are_read_alone(tmp_path: Path) -> None:
    value = torch.randn(10, 7)
    _, entries = read_header(written(tmp_path, x=value))
    counted: list[int] = []
    lazy = LazyTensor(entries["x"], [range(1, 3), range(6, 7)], counted.append)
    assert torch.equal(lazy[...], value[[1, 2, 6]])
    assert sum(counted) == lazy.nbytes == 3 * 7 * 4


def test_scalars_and_empty_tensors_are_read(tmp_path: Path) -> None:
    _, entries = read_header(written(tmp_path, one=torch.tensor(3.5), none=torch.empty(0, 4)))
    assert LazyTensor(entries["one"])[...].item() == 3.5
    assert LazyTensor(entries["none"])[...].shape == (0, 4)


def test_header_whose_sizes_contradict_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, x=torch.zeros(4))
    file.write_bytes(file.read_bytes().replace(b'"shape":[4]', b'"shape":[5]'))
    with pytest.raises(CheckpointError, match=r"a\.safetensors, tensor x: 16 bytes"):
        read_header(file)


def test_unknown_dtype_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, x=torch.zeros(4))
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"Q32"'))
    with pytest.raises(CheckpointError, match="tensor x: dtype Q32"):
        read_header(file)
