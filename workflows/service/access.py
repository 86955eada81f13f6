"""Who may use the service: one secret token, and the browser sessions that it opens.

The token is 256 random bits in a file of mode 0600. Programs send it as `Authorization: Bearer …`. A browser trades it
at /login for a cookie that says until when it holds, signed with a key derived from the token; nothing is stored, so
sessions survive a restart of the service and end with the token. What changes something needs, from a browser, a second
value that only our own pages know (against forged requests of other sites). All comparisons take constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import time
from pathlib import Path

from exitwave.ingest.errors import UsageError

__all__ = ["COOKIE", "SESSION_S", "Access", "load_token"]

COOKIE = "exitwave_session"
SESSION_S = 14 * 24 * 3600


def load_token(path: Path) -> str:
    """The service's token, made on first use. Raises UsageError where others could read it."""
    if os.path.lexists(path):
        return _read(path)
    token = secrets.token_urlsafe(32)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # a kill or a full disk leaves no half of a token
    try:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "w") as file:
            file.write(token + "\n")
            file.flush()
            os.fsync(fd)
        part.rename(path)  # the service's lock is held: nobody else makes one
    finally:
        part.unlink(missing_ok=True)
    return token


def _read(path: Path) -> str:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, encoding="utf-8", errors="replace") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"{path}: expected the token's file, found no plain file. Remove it, and one is made.")
        token = file.read(4096).strip()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise UsageError(
            f"{path}: the token's file must belong to you and be readable by nobody else (mode 0600), it has mode "
            f"{stat.S_IMODE(found.st_mode):04o}. Delete it, and a new token is made."
        )
    if len(token) < 32:
        raise UsageError(f"{path}: no token of at least 32 characters in it. Delete it, and a new token is made.")
    return token


class Access:
    """Pure but for the clock: what is presented is right, or it is not."""

    def __init__(self, token: str) -> None:
        self._token = _digest(token.encode())
        self._key = _digest(b"exitwave session key\0" + token.encode())

    def is_token(self, presented: str) -> bool:
        """Digests are compared, so that neither the length nor a prefix can be told from the time it takes."""
        return hmac.compare_digest(self._token, _digest(presented.encode(errors="surrogateescape")))

    def is_bearer(self, header: str) -> bool:
        """Of the header `Authorization`."""
        scheme, _, presented = header.partition(" ")
        return scheme.lower() == "bearer" and self.is_token(presented.strip())

    def open_session(self, now: float | None = None) -> str:
        """A cookie's value, good for SESSION_S seconds."""
        text = f"{int((time.time() if now is None else now) + SESSION_S)}.{secrets.token_urlsafe(12)}"
        return f"{text}.{self._sign('session', text)}"

    def is_session(self, cookie: str, now: float | None = None) -> bool:
        """Whether it was opened by us and still holds."""
        text, _, signature = cookie.rpartition(".")
        if not hmac.compare_digest(self._sign("session", text).encode(), signature.encode(errors="surrogateescape")):
            return False
        return int(text.split(".")[0]) > (time.time() if now is None else now)

    def csrf(self, cookie: str) -> str:
        """The value that a request which changes something carries beside this session's cookie."""
        return self._sign("csrf", cookie)

    def is_csrf(self, cookie: str, presented: str) -> bool:
        return hmac.compare_digest(self.csrf(cookie).encode(), presented.encode(errors="surrogateescape"))

    def _sign(self, purpose: str, text: str) -> str:
        return hmac.new(self._key, f"{purpose}\0{text}".encode(errors="surrogateescape"), hashlib.sha256).hexdigest()


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
