"""Sign evidence with Ed25519, so that evidence from elsewhere counts only if a trusted key signed it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobit.errors import ArgumentError, EngineError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

PURPOSE = b"isobit evidence, form 2\n"  # a signature made for another purpose does not count
MAKE = "ssh-keygen -t ed25519 -N '' -f isobit-key makes isobit-key and isobit-key.pub; so does openssl, as PEM"


def read_private(path: str) -> Ed25519PrivateKey:
    """Read a private key without a password, in OpenSSH format or PEM."""
    library = _library()
    data, forms = _read(path), library.serialization
    reader = forms.load_ssh_private_key if b"OPENSSH" in data[:64] else forms.load_pem_private_key
    try:
        key = reader(data, None)
    except Exception as error:  # ValueError, TypeError or UnsupportedAlgorithm
        raise _no_key("private", path, str(error)) from None
    if not isinstance(key, library.ed25519.Ed25519PrivateKey):
        raise _no_key("private", path, type(key).__name__)
    return key  # type: ignore[no-any-return]


def read_public(path: str) -> Ed25519PublicKey:
    """Read a public key, in OpenSSH format or PEM."""
    library = _library()
    data, forms = _read(path), library.serialization
    reader = forms.load_ssh_public_key if data[:4] == b"ssh-" else forms.load_pem_public_key
    try:
        key = reader(data)
    except Exception as error:
        raise _no_key("public", path, str(error)) from None
    if not isinstance(key, library.ed25519.Ed25519PublicKey):
        raise _no_key("public", path, type(key).__name__)
    return key  # type: ignore[no-any-return]


def file_name(evidence: str, key: Ed25519PublicKey) -> str:
    """Return the name of a key's signature of an evidence file; several keys may sign one file."""
    return f"{evidence}.{key.public_bytes_raw().hex()[:32]}.sig"


def sign(key: Ed25519PrivateKey, digest: str, last: str) -> str:
    """Sign the last digest of a chain of records, and so all of it."""
    return key.sign(_message(digest, last)).hex()


def is_signed(key: Ed25519PublicKey, digest: str, last: str, signature: str) -> bool:
    """Return whether the key made this signature."""
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(bytes.fromhex(signature), _message(digest, last))
    except (InvalidSignature, ValueError):
        return False
    return True


def _message(digest: str, last: str) -> bytes:
    return PURPOSE + f"{digest}\n{last}\n".encode()


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise _no_key("", path, str(error)) from None


def _no_key(kind: str, path: str, received: str) -> ArgumentError:
    expected = f"an Ed25519 {kind} key without a password in {path}".replace("  ", " ")
    return ArgumentError(expected=expected, received=received[:200], remedy=MAKE)


def _library() -> Any:
    try:
        from types import SimpleNamespace

        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise EngineError(
            expected="the package cryptography, which signs and checks evidence",
            received=str(error),
            remedy="pip install cryptography, or isobit's extra: sign",
        ) from None
    return SimpleNamespace(serialization=serialization, ed25519=ed25519)
