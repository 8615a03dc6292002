"""API keys: files that are refused, keys that are found, and changes without a restart."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

import pytest

from raymoe.api.keys import KeyRing, digest_of, new_key
from raymoe.config import ClientSettings, Settings
from raymoe.errors import AuthenticationError, ConfigError

A, B = digest_of("key a"), digest_of("key b")


def write(file: Path, *lines: str, mode: int = 0o600) -> str:
    """Replace the file at once, as an operator should."""
    part = file.with_suffix(".part")
    part.write_text("\n".join(lines) + "\n", encoding="utf-8")
    part.chmod(mode)
    part.rename(file)
    return str(file)


def test_a_key_is_known_by_its_digest(tmp_path: Path) -> None:
    ring = KeyRing(write(tmp_path / "keys", "# mine", "", f"alice {A}", f"bob\t{B.upper()}"), {})
    assert ring.find("Bearer key a").label == "alice"
    assert ring.find("bearer  key b ").label == "bob"
    assert hashlib.sha256(b"key a").hexdigest() == A


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (None, "is needed"),
        ("", "must be"),
        ("Bearer", "not valid"),
        ("Bearer ", "not valid"),
        ("Basic a2V5IGE=", "must be"),
        ("key a", "must be"),
        ("Bearer key c", "not valid"),
        (f"Bearer {A}", "not valid"),
        ("Bearer key a, Bearer key a", "not valid"),
        ("Bearer \udce9\u20ac", "not valid"),
    ],
)
def test_what_holds_no_valid_key_is_refused_and_not_repeated(header: str | None, text: str) -> None:
    ring = KeyRing(None, {"alice": A})
    with pytest.raises(AuthenticationError, match=text) as refused:
        ring.find(header)
    assert "key c" not in str(refused.value)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("alice", "line 2: behind the label comes the key's SHA-256 digest"),
        ("alice key-in-plain-text", "SHA-256 digest"),
        (f"al/ice {A}", "a label has letters"),
        (f"anonymous {A}", "isn't anonymous"),
        (f"{A}", "SHA-256 digest"),
        (f"alice {A} speed=3", "speed=3 is no limit; accepted: requests_per_minute, tokens_per_minute"),
        (f"alice {A} requests_per_minute", "is no limit"),
        (f"alice {A} requests_per_minute=0", "is no limit"),
        (f"alice {A} requests_per_minute=-1", "is no limit"),
        (f"alice {A} requests_per_minute=²", "is no limit"),
        (f"other {B}", "the same key is there twice"),
        (f"bob {A} tokens_per_minute=5", "another key of bob has other limits"),
    ],
)
def test_a_bad_line_is_named_and_a_key_never_shown(tmp_path: Path, line: str, text: str) -> None:
    file = write(tmp_path / "keys", f"bob {B}", line)
    with pytest.raises(ConfigError, match=text) as refused:
        KeyRing(file, {})
    assert "plain" not in str(refused.value)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601, 0o620, 0o666])
def test_a_file_that_others_can_access_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match=f"mode {mode:o}.*chmod 600"):
        KeyRing(write(tmp_path / "keys", f"alice {A}", mode=mode), {})


def test_a_group_may_read_it_as_secrets_of_kubernetes_are_mounted(tmp_path: Path) -> None:
    file = write(tmp_path / "keys", f"alice {A}", mode=0o440)
    (tmp_path / "link").symlink_to(file)
    assert KeyRing(str(tmp_path / "link"), {}).find("Bearer key a").label == "alice"


def test_no_file_no_text_and_no_key_are_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "binary").chmod(0o600)
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        KeyRing(str(tmp_path / "absent"), {})
    with pytest.raises(ConfigError, match="can't be read: Is a directory"):
        KeyRing(str(tmp_path), {})
    with pytest.raises(ConfigError, match="not UTF-8"):
        KeyRing(str(tmp_path / "binary"), {})
    with pytest.raises(ConfigError, match="holds no API key"):
        KeyRing(write(tmp_path / "keys", "# nothing"), {})


def test_limits_of_a_line_replace_those_of_all(tmp_path: Path) -> None:
    everyone = ClientSettings(requests_per_minute=10, tokens_per_minute=100)
    inline = {"alice": f"{A} requests_per_minute=5 tokens_per_minute=none", "bob": B}
    ring = KeyRing(None, inline, everyone)
    assert ring.find("Bearer key a").allowed == ClientSettings(requests_per_minute=5)
    assert ring.find("Bearer key b").allowed == everyone


def test_a_key_ends_with_its_line_and_another_begins_without_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    ring = KeyRing(write(file, f"alice {A}"), {})
    write(file, f"alice {B}")
    with pytest.raises(AuthenticationError):
        ring.find("Bearer key a")
    assert ring.find("Bearer key b").label == "alice"
    write(file, "# all of them are gone")
    with pytest.raises(AuthenticationError):
        ring.find("Bearer key b")


def test_a_file_that_became_bad_changes_nothing_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    ring = KeyRing(write(file, f"alice {A}"), {})
    for spoil in (lambda: write(file, "alice"), lambda: write(file, f"eve {B}", mode=0o604), file.unlink):
        caplog.clear()
        spoil()
        with caplog.at_level(logging.ERROR):
            for _ in range(3):
                assert ring.find("Bearer key a").label == "alice"
        assert len(caplog.records) == 1 and str(file) in caplog.text
    with pytest.raises(AuthenticationError):
        ring.find("Bearer key b")
    write(file, f"bob {B}")
    assert ring.find("Bearer key b").label == "bob"


def test_a_mode_that_became_right_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    ring = KeyRing(write(file, f"alice {A}"), {})
    write(file, f"bob {B}", mode=0o644)
    assert ring.find("Bearer key a").label == "alice"
    os.chmod(file, 0o600)
    assert ring.find("Bearer key b").label == "bob"


def test_a_fresh_key_opens_what_its_line_is_written_into(tmp_path: Path) -> None:
    key, line = new_key("alice")
    ring = KeyRing(write(tmp_path / "keys", line), {})
    assert ring.find(f"Bearer {key}").label == "alice"
    assert key not in line and len(key) > 40
    assert new_key("alice")[0] != key
    with pytest.raises(ConfigError, match="a label has"):
        new_key("a b")


def test_settings_without_keys_have_no_ring(tmp_path: Path) -> None:
    assert KeyRing.of(Settings()) is None
    both = {"keys": {"alice": A}, "keys_file": write(tmp_path / "keys", f"bob {B}")}
    ring = KeyRing.of(Settings.build({"server": both, "clients": {"requests_per_minute": 3}}))
    assert ring is not None
    assert [ring.find(f"Bearer key {k}").label for k in "ab"] == ["alice", "bob"]
    assert ring.find("Bearer key a").allowed.requests_per_minute == 3


def test_the_environment_can_hold_keys() -> None:
    settings = Settings.load(None, {"RAYMOE_SERVER__KEYS": f"{{alice: {A}}}"})
    ring = KeyRing.of(settings)
    assert ring is not None and ring.find("Bearer key a").label == "alice"
