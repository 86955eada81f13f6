"""TLS as one switch: a key and a certificate of the user's own, made once, that scheduler, workers and client share.

Whoever holds the key may join; nobody else can, not even to look. Both files can be read by their owner alone.
"""

from __future__ import annotations

import datetime
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import dask.config

from exitwave.ingest.errors import UsageError

__all__ = ["certificate_files", "default_folder", "security", "worker_options"]

_YEARS = 10


def default_folder() -> Path:
    return Path.home() / ".config" / "exitwave" / "tls"


def certificate_files(folder: Path | None = None) -> tuple[Path, Path]:
    """(certificate, key) in PEM; made where there are none. UsageError where others could read the key.

    The certificate is its own authority: a self-signed one of an elliptic-curve key (P-256).
    """
    folder = folder or default_folder()
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    if not key.exists():
        _make(folder)
    for path in (certificate, key):
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            raise UsageError(f"{path} is missing: remove {folder}, and a new pair is made") from None
        if path == key and stat.S_IMODE(mode) & 0o077:
            raise UsageError(f"{path} can be read by others: chmod 600 {path}, or remove {folder} for a new pair")
    return certificate, key


def _make(folder: Path) -> None:
    """Both files at once: the folder appears with them in it."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise UsageError("certificates for TLS are made by `cryptography`: pip install 'exitwave[slurm]'") from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "exitwave")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # clocks of nodes differ
        .not_valid_after(now + datetime.timedelta(days=365 * _YEARS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".tls-", dir=folder.parent))  # 0700
    encoding = serialization.Encoding.PEM
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    for part, content in (("certificate.pem", certificate.public_bytes(encoding)), ("key.pem", private)):
        with open(made / part, "wb", opener=lambda p, flags: os.open(p, flags, 0o600)) as file:
            file.write(content)
    try:
        made.rename(folder)
    except OSError:  # somebody else was faster
        for path in made.iterdir():
            path.unlink()
        made.rmdir()


def worker_options(folder: Path | None = None) -> list[str]:
    """What `dask worker` and `dask scheduler` are told of it."""
    certificate, key = map(str, certificate_files(folder))
    return ["--tls-ca-file", certificate, "--tls-cert", certificate, "--tls-key", key]


def security(folder: Path | None = None, *, own: bool = True) -> Any:
    """A distributed Security that refuses whatever is not encrypted.

    Not `own`: the files that the user's Dask configuration names (`distributed.comm.tls`) where it names any.
    """
    from distributed.security import Security

    if not own and dask.config.get("distributed.comm.tls.ca-file", None):
        return Security(require_encryption=True)
    certificate, key = map(str, certificate_files(folder))
    roles = {f"tls_{role}_{part}": path for role in ("client", "scheduler", "worker")
             for part, path in (("cert", certificate), ("key", key))}  # fmt: skip
    return Security(require_encryption=True, tls_ca_file=certificate, **roles)
