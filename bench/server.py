"""The real server as `bench serve` runs it: a subprocess with a free port, a name and a state folder of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from raymoe.actors.ports import free_port

START_S = 300.0
STOP_S = 90.0


def add_word_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer of one word per id: a text tells its token ids."""
    vocab = {f"t{token}": token for token in range(vocab_size)}
    words = Tokenizer(models.WordLevel(vocab=vocab, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def ids_of(text: str) -> list[int]:
    """The token ids of a text of that tokenizer."""
    return [int(word.removeprefix("t")) for word in text.split()]


class Server:
    """A running server. `left_over` names what still ran after its end."""

    def __init__(self, folder: Path, model: Path, *options: str) -> None:
        port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "server.log"
        self.left_over: list[str] = []
        self._family: list[psutil.Process] = []
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "RAYMOE_"))}
        command = [sys.executable, "-m", "raymoe.cli", "serve", str(model), "--port", str(port)]
        with self.log.open("w") as log:
            # A session of its own, so that a signal to its group is what Ctrl-C in a terminal is.
            self.process = subprocess.Popen(
                [*command, "--set", f"server.app=bench-{os.getpid()}", *options],
                env={**kept, "XDG_RUNTIME_DIR": str(folder)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Until requests will be answered."""
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/ready", timeout=10, trust_env=False).status_code == 200:
                    return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.1)

    def engine(self) -> psutil.Process:
        """The router's engine process."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if "raymoe.engine.process" in process.cmdline():
                    return process
        raise RuntimeError("the server has no engine process")

    def stop(self) -> None:
        """End it as Ctrl-C does, then whatever of it is left."""
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.process.pid)
            self._family = [parent, *parent.children(recursive=True)]
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
        deadline = time.monotonic() + 15
        while (
            alive := [process for process in self._family if _runs(process)]
        ) and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                self.left_over.append(" ".join(process.cmdline()))
                process.kill()
        self.process.wait(STOP_S)


@contextlib.contextmanager
def served(folder: Path, model: Path, *options: str) -> Iterator[Server]:
    """A server that is ready; it has ended when the context has."""
    server = Server(folder, model, *options)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        # A zombie is gone: in a container nobody may reap it.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
