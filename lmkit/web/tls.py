"""TLS: the certificate that a server shows, and the authorities that lmkit's own clients trust."""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from pathlib import Path

from lmkit.environment import environment
from lmkit.errors import ConfigError
from lmkit.log import get_logger

# Not before and not after, in a certificate's DER (RFC 5280, 4.1.2.5).
_VALIDITY = re.compile(rb"(?:\x17\x0d\d{12}Z|\x18\x0f\d{14}Z)(?:\x17\x0d(\d{12})Z|\x18\x0f(\d{14})Z)")

logger = get_logger(__name__)


class Certificate:
    """A certificate chain and its key, in PEM files. `context` is for a listening server: TLS 1.2 and later."""

    def __init__(self, cert: str, key: str | None) -> None:
        """Without `key`, the file of the certificate has it. Raises ConfigError."""
        self._cert, self._key = cert, key
        self.pem = b"", b""  # the key and the chain, for servers that take no context
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load(self.context)

    def reload(self) -> None:
        """Read the files again, for connections from now on. If they cannot be used, the old ones stay."""
        try:
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # a failure may leave half of it in a context
            self._load(self.context)
        except ConfigError as error:
            logger.error("the certificate is not renewed: %s", error)
        else:
            logger.info("the certificate is read anew from %s", self._cert)

    def _load(self, context: ssl.SSLContext) -> None:
        for name, path in (("tls_cert", self._cert), ("tls_key", self._key)):
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{name}: there is no file {path}")
        try:
            chain, key = Path(self._cert).read_bytes(), Path(self._key or self._cert).read_bytes()
            context.load_cert_chain(self._cert, self._key, password=_no_password)
            end = _end(chain.decode())
        except (OSError, ValueError) as error:  # SSLError is an OSError
            files = self._cert if self._key is None else f"{self._cert} and {self._key}"
            raise ConfigError(f"{files}: {_reason(error)}") from None
        self.pem = key, chain
        if end is not None and end < datetime.now(UTC):
            logger.warning("tls_cert %s has expired on %s: clients will refuse it", self._cert, end.date())


def certificate(cert: str | None, key: str | None) -> Certificate | None:
    """The certificate of a server's configuration. Raises ConfigError."""
    if cert is None and key is not None:
        raise ConfigError("tls_key needs tls_cert, the certificate")
    return None if cert is None else Certificate(cert, key)


def trusting(context: ssl.SSLContext) -> ssl.SSLContext:
    """`context` of a client, which also trusts the authorities in LMKIT_CA_FILE. Raises ConfigError."""
    path = environment().ca_file
    if path is not None:
        try:
            context.load_verify_locations(path)
        except OSError as error:  # SSLError is one
            reason = "no certificate in PEM" if isinstance(error, ssl.SSLError) else error.strerror
            raise ConfigError(f"LMKIT_CA_FILE={path}: {reason}") from None
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted; write it without a passphrase")


def _reason(error: Exception) -> str:
    if not isinstance(error, ssl.SSLError):
        return getattr(error, "strerror", None) or str(error)
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key is not that of the certificate"
    return "expected a certificate and its key, in PEM"


def _end(pem: str) -> datetime | None:
    """The end of the first certificate's validity."""
    first = pem[pem.find(ssl.PEM_HEADER) :].partition(ssl.PEM_FOOTER)[0]
    found = _VALIDITY.search(ssl.PEM_cert_to_DER_cert(f"{first.strip()}\n{ssl.PEM_FOOTER}\n"))
    if found is None:
        return None
    short, long = found.groups()
    text = long or ((b"19" if short[:2] >= b"50" else b"20") + short)
    return datetime.strptime(text.decode(), "%Y%m%d%H%M%S").replace(tzinfo=UTC)
