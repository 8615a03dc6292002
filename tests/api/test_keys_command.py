"""`raymoe keys new`: its two streams, and what they are good for."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from raymoe.api.keys import KeyRing
from raymoe.cli import app
from raymoe.errors import ConfigError


def test_the_line_goes_to_stdout_alone_and_opens_with_the_key_of_stderr(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["keys", "new", "alice"])
    assert done.exit_code == 0
    (line,) = done.stdout.splitlines()
    key = done.stderr.split()[-1]
    assert key not in done.stdout
    (tmp_path / "keys").touch(0o600)
    (tmp_path / "keys").write_text(done.stdout)
    assert KeyRing(str(tmp_path / "keys"), {}).find(f"Bearer {key}").label == "alice" == line.split()[0]


def test_a_label_that_no_file_may_hold_is_refused() -> None:
    done = CliRunner().invoke(app, ["keys", "new", "a b"])
    assert done.exit_code == 1
    with pytest.raises(ConfigError, match="a label has"):
        raise done.exception or AssertionError("no error")
    assert done.stdout == ""
