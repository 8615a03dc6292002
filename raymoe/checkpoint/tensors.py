"""The safetensors format: headers, and reads of whole tensors or some of their rows into memory of our own.

The safetensors library maps files into memory, and mapped pages count as this process's memory until the
kernel takes them back. We read with `preadv` instead: a process holds what it asked for, and nothing else.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raymoe.errors import CheckpointError

OnBytes = Callable[[int], None]
"""Told how many bytes were just read. May be called from several threads at once."""

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_HEADER_LIMIT = 100 << 20
_CHUNK = 32 << 20


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: `nbytes` bytes from `offset` of `file`; `dtype` as safetensors writes it ("F32")."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int


def read_header(file: Path) -> tuple[bytes, dict[str, TensorEntry]]:
    """The raw header of a safetensors file and its entries.

    Raises:
        CheckpointError: the file is absent, cut short, or not safetensors; names file and tensor.
    """
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 0 < length <= min(size - 8, _HEADER_LIMIT):
                raise CheckpointError(f"{file} is not a complete safetensors file ({size} bytes)")
            raw = stream.read(length)
    except OSError as error:
        raise CheckpointError(f"{file} can't be read: {error.strerror}") from None
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
        header.pop("__metadata__", None)
        entries = {name: _entry(name, file, value, 8 + length) for name, value in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{file} has a malformed safetensors header: {error}") from None
    expected = 8 + length
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset != expected:
            raise CheckpointError(
                f"{file}, tensor {entry.name}: its bytes don't follow those of the one before"
            )
        expected += entry.nbytes
    if size != expected:
        raise CheckpointError(
            f"{file} has {size} bytes where its header says {expected}: is the download incomplete?"
        )
    return raw, entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
        raise ValueError(f"{twice} is defined twice")
    return value


def _entry(name: str, file: Path, value: Any, base: int) -> TensorEntry:
    dtype, shape = value["dtype"], tuple(value["shape"])
    begin, end = value["data_offsets"]
    if dtype not in DTYPES:
        raise CheckpointError(f"{file}, tensor {name}: dtype {dtype} is not one of {', '.join(DTYPES)}")
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if min((begin, *shape)) < 0 or end - begin != nbytes:
        raise CheckpointError(f"{file}, tensor {name}: {end - begin} bytes don't hold {dtype} of {shape}")
    return TensorEntry(name, file, dtype, shape, nbytes, base + begin)


class LazyTensor:
    """A tensor that is read at `lazy[...]`: all of it, or the rows of dimension 0 in `rows`.

    Every read gives new, writable memory.

    Raises (when read):
        CheckpointError: the file ends early or can't be read.
    """

    def __init__(
        self, entry: TensorEntry, rows: Sequence[range] | None = None, on_bytes: OnBytes | None = None
    ) -> None:
        self.entry, self.on_bytes = entry, on_bytes
        if rows is None:
            self.shape, self._spans = entry.shape, [(entry.offset, entry.nbytes)]
        else:
            row = entry.nbytes // entry.shape[0]
            self.shape = (sum(len(run) for run in rows), *entry.shape[1:])
            self._spans = [(entry.offset + run.start * row, len(run) * row) for run in rows]

    @property
    def nbytes(self) -> int:
        """Bytes that reading it takes from disk."""
        return sum(length for _, length in self._spans)

    def __getitem__(self, key: object) -> torch.Tensor:
        if key is not Ellipsis:
            raise TypeError("a lazy tensor is read as a whole: lazy[...]")
        buffer = torch.empty(self.nbytes, dtype=torch.uint8)
        view = memoryview(buffer.numpy())
        try:
            descriptor = os.open(self.entry.file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for offset, length in self._spans:
                    self._read(descriptor, view[:length], offset)
                    view = view[length:]
            finally:
                os.close(descriptor)
        except OSError as error:
            raise CheckpointError(f"{self.entry.file} can't be read: {error.strerror}") from None
        return buffer.view(DTYPES[self.entry.dtype]).view(self.shape)

    def _read(self, descriptor: int, view: memoryview, offset: int) -> None:
        while view:
            count = os.preadv(descriptor, [view[:_CHUNK]], offset)
            if count == 0:
                raise CheckpointError(f"{self.entry.file} ends within tensor {self.entry.name}")
            if self.on_bytes is not None:
                self.on_bytes(count)
            view, offset = view[count:], offset + count
