"""TLS of servers and proxies, and of lmkit's own clients."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from lmkit.errors import ConfigError
from lmkit.web.tls import Certificate, certificate, trusting
from tests.serve.live import Server

FILES = Path(__file__).parent / "certificates"
FIRST, SECOND = ("first", "second")


def pair(name: str) -> tuple[str, str]:
    return str(FILES / f"{name}.pem"), str(FILES / f"{name}.key")


def shown(address: tuple[str, int]) -> bytes:
    """The certificate that a server shows."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(address, 10) as raw, context.wrap_socket(raw) as connection:
        found = connection.getpeercert(binary_form=True)
        assert found
        return found


def der(name: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert((FILES / f"{name}.pem").read_text())


@pytest.mark.parametrize(
    ("cert", "key", "message"),
    [
        ("none.pem", "first.key", "tls_cert: there is no file .*none.pem"),
        ("first.pem", "none.key", "tls_key: there is no file .*none.key"),
        ("first.pem", "second.key", "first.pem and .*second.key: the key is not that of the certificate"),
        ("first.pem", None, "first.pem: expected a certificate and its key, in PEM"),
        ("first.key", "first.key", "expected a certificate and its key, in PEM"),
        ("first.pem", "locked.key", "the key is encrypted; write it without a passphrase"),
        (None, "first.key", "tls_key needs tls_cert"),
    ],
)
def test_files_that_cannot_be_used_are_named(cert: str | None, key: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        certificate(cert and str(FILES / cert), key and str(FILES / key))


def test_a_key_may_stand_in_the_file_of_the_certificate(tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_text((FILES / "first.key").read_text() + (FILES / "first.pem").read_text())
    assert Certificate(str(both), None).context.minimum_version is ssl.TLSVersion.TLSv1_2


def test_an_expired_certificate_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("lmkit.web.tls")
    logger.addHandler(caplog.handler)  # lmkit's loggers may not propagate
    try:
        Certificate(*pair("first"))
        assert not caplog.records
        Certificate(str(FILES / "expired.pem"), str(FILES / "first.key"))
    finally:
        logger.removeHandler(caplog.handler)
    assert "expired.pem has expired on 2026-11-21: clients will refuse it" in caplog.text


def test_authorities_that_cannot_be_read_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMKIT_CA_FILE", "/nowhere.pem")
    with pytest.raises(ConfigError, match="LMKIT_CA_FILE"):
        trusting(ssl.create_default_context())


@contextlib.contextmanager
def proxy_in_front(node: str, folder: Path, *options: str, **environment: str):  # type: ignore[no-untyped-def]
    """The address and the log of an `lmkit proxy`."""
    command = [sys.executable, "-m", "lmkit", "proxy", "--port", "0", "--node", node, *options]
    with open(folder / "proxy.log", "w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | environment)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1]
    finally:
        process.terminate()
        process.wait(20)


def lmkit(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lmkit", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | environment,
        check=False,
    )


def test_https_from_the_client_through_the_proxy_to_the_node(tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    shutil.copy(FILES / "first.pem", cert)
    shutil.copy(FILES / "first.key", key)
    trust = {"LMKIT_CA_FILE": str(cert)}
    with Server("--tls-cert", str(cert), "--tls-key", str(key)) as server:
        assert server.url.startswith("https://127.0.0.1:")
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        with proxy_in_front(server.url, tmp_path, "--tls-cert", str(cert), "--tls-key", str(key), **trust) as proxy:
            assert proxy.startswith("https://")
            status = lmkit("proxy", "status", "--json", "--proxy", proxy, **trust)
            assert json.loads(status.stdout)["data"][0]["healthy"] is True
            # Without a seed, the two tokens may be the beginning of a character that has more bytes: nothing is shown.
            answer = lmkit("chat", proxy, "--prompt", "Hi", "--max-tokens", "2", "--seed", "0", **trust)
            assert (answer.returncode, answer.stderr) == (0, "")
            assert answer.stdout.strip() == "The"
        refused = lmkit("chat", server.url, "--prompt", "Hi")
        assert refused.returncode == 2
        assert refused.stderr.endswith("; LMKIT_CA_FILE names an authority to trust\n")
        assert len(refused.stderr.splitlines()) == 1
        # A renewed certificate is shown after SIGHUP, and one that cannot be used is not.
        assert shown(address) == der(FIRST)
        shutil.copy(FILES / "second.pem", cert)
        server.process.send_signal(signal.SIGHUP)
        server.wait_for_line("the certificate is not renewed: .* the key is not that of the certificate")
        assert shown(address) == der(FIRST)
        shutil.copy(FILES / "second.key", key)
        server.process.send_signal(signal.SIGHUP)
        server.wait_for_line("the certificate is read anew")
        assert shown(address) == der(SECOND)
        assert server.terminate() == 0
