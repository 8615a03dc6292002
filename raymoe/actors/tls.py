"""TLS by files: looked at before anything is started, and trusted by our own calls to the server."""

from __future__ import annotations

import ssl

from raymoe.config import ServerSettings
from raymoe.errors import ConfigError


def check_tls(server: ServerSettings) -> None:
    """Refuse TLS settings that Serve would fail with, or would not keep.

    Raises:
        ConfigError: says which, and why.
    """
    files = {"server.tls_cert": server.tls_cert, "server.tls_key": server.tls_key}
    given = {name: file for name, file in files.items() if file is not None}
    if not given:
        return
    if len(given) == 1:
        raise ConfigError(
            f"server.tls_cert and server.tls_key belong together; only {next(iter(given))} is set"
        )
    for name, file in given.items():
        try:
            with open(file, "rb"):
                pass
        except OSError as error:
            raise ConfigError(f"{name}: {file} can't be read: {error.strerror}") from None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            given["server.tls_cert"], given["server.tls_key"], password=_no_passphrase
        )
    except (ssl.SSLError, ValueError) as error:
        why = getattr(error, "reason", None) or str(error)
        raise ConfigError(
            f"{server.tls_cert} and {server.tls_key} are no PEM certificate with its private key,"
            f" or the key has a passphrase: {why}"
        ) from None


def trust(cert: str | None) -> ssl.SSLContext | bool:
    """For httpx's `verify`: the server that has the certificate in the file `cert`; None: as usual."""
    if cert is None:
        return True
    context = ssl.create_default_context(cafile=cert)
    # The file may hold no root, and the certificate no name of this machine. It must be this very one instead.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False
    return context


def _no_passphrase() -> str:
    # Without it OpenSSL would ask on the terminal.
    raise ValueError("it has one")
