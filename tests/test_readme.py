"""The README is true: its commands run against a real server, and print what it shows.

Blocks of `sh` and `python` are run, in order; a `text` or `json` block right after one is what it prints. `yaml`
is settings. In shown text "…" stands for anything within a line; numbers and hexadecimal ids may differ.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from raymoe.actors.ports import free_port
from raymoe.config import Settings
from tests.embedded_fixture import embedded_folder
from tests.server_process import Server, environment, left_over
from tests.tiny import tiny_checkpoint

__all__ = ["embedded_folder"]

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
RUN, SHOWN = {"sh", "python"}, {"text", "json"}


class Step(NamedTuple):
    """One command or program of the README, and the block after it."""

    language: str
    text: str
    shown: tuple[str, str] | None


def commands(script: str) -> list[str]:
    """A block's commands. One goes over several lines while a quotation is open or a backslash ends its line."""
    found, part = [], ""
    for line in script.splitlines():
        part += line + "\n"
        try:
            open_ended = part.endswith("\\\n") or not shlex.split(part)
        except ValueError:
            open_ended = True
        if not open_ended:
            found.append(part.strip())
            part = ""
    assert not part.strip(), f"unfinished command: {part}"
    return found


def steps(markdown: str) -> list[Step]:
    """All that is to be run. A block in no known language, or shown without a command, is an error."""
    found: list[Step] = []
    before = ""
    for language, text in re.findall(r"^```(\w*)\n(.*?)^```$", markdown, re.M | re.S):
        if language == "sh":
            found += [Step(language, command, None) for command in commands(text)]
        elif language == "python":
            found.append(Step(language, text, None))
        elif language in SHOWN:
            assert before in RUN, f"this output follows no command: {text}"
            found[-1] = found[-1]._replace(shown=(language, text))
        else:
            assert language == "yaml", f"a code block in {language or 'no language'}: {text}"
        before = language
    return found


def hide(text: str) -> str:
    """The text without what differs from run to run."""
    return re.sub(r"\d+(\.\d+)?", "#", re.sub(r"\b[0-9a-f]{8,}\b", "#", text.strip()))


def alike(shown: str, printed: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, hide(shown).split("…"))), hide(printed)) is not None


def without_ids(value: Any) -> Any:
    """An answer without its id and time."""
    return {key: part for key, part in value.items() if key not in {"id", "created"}}


def check_shown(step: Step, printed: str) -> None:
    if step.shown is None:
        return
    language, shown = step.shown
    if language == "json":
        assert without_ids(json.loads(printed)) == without_ids(json.loads(shown)), step.text
    else:
        assert alike(shown, printed), f"{step.text}\nprinted:\n{printed}\nREADME.md shows:\n{shown}"


class Reader:
    """Does what the README says. Its ports 8000 and 9000 are two that are free here."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.grpc_port = server.status()["grpc_url"].rpartition(":")[2]

    def do(self, step: Step) -> None:
        if step.language == "python":
            return self.run(step, [sys.executable, "-c", self.here(step.text)])
        return handler(step.text)(self, step)

    def here(self, text: str) -> str:
        return text.replace(":8000", f":{self.server.port}").replace(":9000", f":{self.grpc_port}")

    def run(self, step: Step, command: list[str]) -> None:
        path = os.pathsep.join([str(BIN), os.environ["PATH"]])
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment(self.server.runtime, PATH=path),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, f"{step.text}\n{done.stdout}{done.stderr}\n{self.server.log.read_text()}"
        check_shown(step, done.stdout.replace(f":{self.server.port}", ":8000"))

    def shell(self, step: Step) -> None:
        self.run(step, ["bash", "-o", "pipefail", "-c", self.here(step.text)])

    def serving(self, step: Step) -> None:
        """`scripts/serve` runs already: its log holds the lines shown, in this order."""
        wanted = step.shown[1].splitlines() if step.shown else []
        deadline = time.monotonic() + 30
        # It answers a moment before it says so.
        while missing := self.missing(wanted):
            assert time.monotonic() < deadline, f"the server's log lacks, or lacks by then: {missing}"
            time.sleep(0.1)

    def missing(self, wanted: list[str]) -> str | None:
        """The first of these lines that the server's log does not hold after those before it."""
        log = iter(self.server.log.read_text().replace(f":{self.server.port}", ":8000").splitlines())
        return next((line for line in wanted if not any(alike(line, said) for said in log)), None)

    def serve_own(self, step: Step) -> None:
        """`raymoe serve PATH ...`, with a tiny checkpoint for PATH."""
        words = shlex.split(step.text)
        words[0] = str(BIN / "raymoe")
        words[2] = str(tiny_checkpoint("olmoe", self.folder / "tiny-olmoe"))
        settings = re.findall(r"^```yaml\n(.*?)^```$", README, re.M | re.S)
        words[words.index("settings.yaml")] = str(self.folder / "settings.yaml")
        (self.folder / "settings.yaml").write_text(settings[0])
        port = free_port("127.0.0.1")
        server = Server(self.folder, [*words, "--port", str(port)], port)
        try:
            server.wait_ready()
            assert len(server.status()["groups"]) == int(words[words.index("--groups") + 1])
        finally:
            assert server.stop() == 130, server.log.read_text()

    def exists(self, step: Step) -> None:
        assert os.access(ROOT / shlex.split(step.text)[-1], os.R_OK | os.X_OK)

    def readable(self, step: Step) -> None:
        assert (BIN / Path(step.text).name).is_file(), step.text


HANDLERS: dict[str, Callable[[Reader, Step], None]] = {
    "scripts/serve": Reader.serving,
    # It is what runs this test.
    "scripts/test": Reader.exists,
    "curl": Reader.shell,
    "source .venv/bin/activate": Reader.readable,
    "raymoe keys": Reader.shell,
    "raymoe serve": Reader.serve_own,
    "raymoe chat": Reader.shell,
    "raymoe status": Reader.shell,
    "raymoe down": Reader.shell,
}


def handler(command: str) -> Callable[[Reader, Step], None]:
    """How a command is run here. An unknown one is an error: give it a line in HANDLERS."""
    for start, found in HANDLERS.items():
        if command == start or command.startswith(f"{start} "):
            return found
    raise AssertionError(
        f"tests/test_readme.py does not know how to run this command of README.md: {command}"
    )


@pytest.fixture
def server(tmp_path: Path, embedded_folder: Path) -> Iterator[Server]:
    """`scripts/serve` as the README starts it, on a free port."""
    if not (ROOT / ".venv/.setup-done").is_file():
        pytest.skip(
            "scripts/setup has not run here, so scripts/serve would install packages; use scripts/test"
        )
    port = free_port("127.0.0.1")
    # With gRPC from the start: the README starts it a second time for that.
    ports = ["--port", str(port), "--grpc-port", str(free_port("127.0.0.1"))]
    server = Server(tmp_path, [str(ROOT / "scripts/serve"), *ports], port)
    family = []
    try:
        server.wait_ready(240)
        family = server.family()
        yield server
    finally:
        # The README ends it with `raymoe down`, which is 0; 130 is Ctrl-C, after a step that failed.
        assert server.stop() in {0, 130}, server.log.read_text()
        assert left_over(family) == []


@pytest.mark.server
@pytest.mark.timeout(540)
def test_every_command_runs_and_prints_what_the_readme_shows(server: Server, tmp_path: Path) -> None:
    reader = Reader(server, tmp_path)
    for step in steps(README):
        reader.do(step)
    assert server.process.poll() == 0, "the README ends with the server stopped"


def test_every_command_is_known_and_the_two_scripts_are_there() -> None:
    found = steps(README)
    for step in found:
        if step.language == "sh":
            handler(step.text)
    assert {"scripts/serve", "scripts/test"} <= {step.text for step in found}
    assert any(step.text.startswith("curl") and step.shown for step in found)


def test_the_settings_shown_are_accepted() -> None:
    shown = re.findall(r"^```yaml\n(.*?)^```$", README, re.M | re.S)
    assert len(shown) == 1
    assert Settings.build(yaml.safe_load(shown[0])) != Settings()


def test_what_is_not_understood_is_not_passed_over() -> None:
    with pytest.raises(AssertionError, match="raymoe fly"):
        handler("raymoe fly")
    for text in ("```text\nx\n```\n", "```\nx\n```\n", "```console\n$ x\n```\n"):
        with pytest.raises(AssertionError):
            steps(text)
    assert commands("a 'b\nc' | d\ne \\\n f\n") == ["a 'b\nc' | d", "e \\\n f"]


def test_a_difference_in_the_output_is_noticed() -> None:
    assert alike("g0 of 12ab34cd (…) 5 s\n", "g1 of 99ab34cd (x y) 17.5 s")
    assert not alike("Paris.", "Rome.")
    assert not alike("a … c", "a b\nc")
    step = Step("sh", "curl", ("json", '{"id": "a", "text": "Paris"}'))
    check_shown(step, '{"id": "b", "text": "Paris"}')
    with pytest.raises(AssertionError):
        check_shown(step, '{"id": "a", "text": "Rome"}')
