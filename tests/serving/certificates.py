"""Certificates for tests of TLS."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


def write_certificates(directory: Path) -> Path:
    """A self-signed authority, and a certificate for this machine that it signed: `ca.pem`, `own.pem`, `own.key`,
    and that key with a passphrase, `encrypted.key`."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    key = ("-newkey", "rsa:2048", "-nodes", "-days", "2")
    openssl("req", "-x509", *key, "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.pem")
    openssl("req", *key[:3], "-subj", "/CN=localhost", "-keyout", "own.key", "-out", "own.csr")
    (directory / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names", "-days", "2")
    openssl("x509", "-req", "-in", "own.csr", *signing, "-out", "own.pem")
    openssl("pkcs8", "-topk8", "-in", "own.key", "-out", "encrypted.key", "-passout", "pass:secret")
    return directory
