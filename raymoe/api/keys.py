"""API keys: known by their SHA-256 digests alone, read again when their file changes.

A fast hash is enough, because a key is 256 random bits and no password.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from raymoe.config import ClientSettings, Settings
from raymoe.engine.messages import ANONYMOUS
from raymoe.errors import AuthenticationError, ConfigError

logger = logging.getLogger(__name__)

PREFIX = "rm-"
"""By which people, and scanners of source code, know a key of raymoe."""
MAX_FILE_BYTES = 8 << 20
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FORBIDDEN = stat.S_IRWXO | stat.S_IWGRP


@dataclass(frozen=True)
class Key:
    """A valid key: whose it is, its digest in hex, and what its client may do."""

    label: str
    digest: str
    allowed: ClientSettings


class KeyRing:
    """The keys that are valid now."""

    def __init__(
        self, file: str | None, inline: Mapping[str, str], allowed: ClientSettings = ClientSettings()
    ) -> None:
        """
        Args:
            file: path of the file of keys.
            inline: label to the rest of a line of such a file.
            allowed: what a client may do whose line says nothing else.

        Raises:
            ConfigError: names file, line and mistake; also when there is no key at all.
        """
        self._file, self._allowed = file, allowed
        self._inline = [(f"server.keys {label}", [label, *rest.split()]) for label, rest in inline.items()]
        self._seen = self._look()
        self._keys = self._read()
        if not self._keys:
            raise ConfigError(f"{file or 'server.keys'} holds no API key")

    @classmethod
    def of(cls, settings: Settings) -> KeyRing | None:
        """The keys that the settings name; None if they name none, so that everybody is let in."""
        server = settings.server
        if not server.guarded:
            return None
        return cls(server.keys_file, server.keys, settings.clients)

    def find(self, authorization: str | None) -> Key:
        """Whose key an Authorization header holds.

        Raises:
            AuthenticationError: it holds none that is valid.
        """
        if authorization is None:
            raise AuthenticationError("an API key is needed: send it as `Authorization: Bearer KEY`")
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise AuthenticationError("the Authorization header must be `Bearer KEY`")
        self._reread()
        digest, found = digest_of(key.strip()), None
        # All of them, and without regard to where they differ: the time tells nothing of the digests.
        for known in self._keys:
            if hmac.compare_digest(known.digest, digest):
                found = known
        if found is None:
            raise AuthenticationError("this API key is not valid")
        return found

    def _reread(self) -> None:
        seen = self._look()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._keys = self._read()
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error.message)
        else:
            logger.info("the API keys were read again: %d", len(self._keys))

    def _look(self) -> tuple[int, ...] | None:
        """What changes when the file does."""
        if self._file is None:
            return None
        try:
            found = os.stat(self._file)
        except OSError as error:
            return (error.errno or 0,)
        return found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size

    def _read(self) -> tuple[Key, ...]:
        lines = list(self._inline)
        if self._file is not None:
            for number, line in enumerate(_lines(self._file), 1):
                words = line.split()
                if words and not words[0].startswith("#"):
                    lines.append((f"{self._file} line {number}", words))
        keys: dict[str, Key] = {}
        clients: dict[str, Key] = {}
        for where, words in lines:
            key = _parse(where, words, self._allowed)
            if key.digest in keys:
                raise ConfigError(f"{where}: the same key is there twice")
            if clients.setdefault(key.label, key).allowed != key.allowed:
                raise ConfigError(f"{where}: another key of {key.label} has other limits")
            keys[key.digest] = key
        return tuple(keys.values())


def _lines(file: str) -> list[str]:
    try:
        with open(file, encoding="utf-8") as opened:
            found = os.fstat(opened.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_FILE_BYTES:
                raise ConfigError(f"{file} is no file of API keys")
            if found.st_mode & _FORBIDDEN:
                raise ConfigError(
                    f"{file} holds API keys and has mode {found.st_mode & 0o777:o}: others must not access it,"
                    " nor its group write it (chmod 600)"
                )
            return opened.read().splitlines()
    except OSError as error:
        raise ConfigError(f"the API keys in {file} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is no file of API keys: it is not UTF-8") from None


def _parse(where: str, words: list[str], default: ClientSettings) -> Key:
    if not _LABEL.fullmatch(words[0]) or words[0] == ANONYMOUS:
        raise ConfigError(f"{where}: a label has letters, digits, '.', '_' and '-', and isn't {ANONYMOUS}")
    if len(words) < 2 or not _DIGEST.fullmatch(words[1].lower()):
        # Never the word itself: it may be the key.
        raise ConfigError(f"{where}: behind the label comes the key's SHA-256 digest, 64 hex digits")
    return Key(words[0], words[1].lower(), _limits(where, words[2:], default))


def _limits(where: str, words: Iterable[str], default: ClientSettings) -> ClientSettings:
    values: dict[str, Any] = default.model_dump()
    for word in words:
        name, equals, value = word.partition("=")
        wrong = not (value == "none" or (value.isascii() and value.isdecimal() and int(value) > 0))
        if not equals or name not in values or wrong:
            raise ConfigError(
                f"{where}: {word} is no limit; accepted: {', '.join(values)}, = and a positive number or none"
            )
        values[name] = None if value == "none" else int(value)
    return ClientSettings(**values)


def digest_of(key: str) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def new_key(label: str) -> tuple[str, str]:
    """A fresh key of 256 random bits, and its line for the file of keys.

    Raises:
        ConfigError: the label is none.
    """
    key = PREFIX + secrets.token_urlsafe(32)
    made = _parse("LABEL", [label, digest_of(key)], ClientSettings())
    return key, f"{made.label} {made.digest}"
