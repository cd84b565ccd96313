"""Ed25519 signatures of artifacts, for loading artifacts that others have made.

A signature covers the bytes of manifest.json, which has the SHA-256 of every other file. `openssl` can create and
verify it:

    openssl genpkey -algorithm ed25519 -out key.pem
    openssl pkey -in key.pem -pubout -out key.pub
    openssl pkeyutl -verify -pubin -inkey key.pub -rawin -in manifest.json -sigfile manifest.sig
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from ...errors import ArtifactError, InputError
from ...machine import describe_missing_package

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

# A PEM file, the key's 32 bytes, or a key of the package `cryptography`.
SigningKey: TypeAlias = Union[str, os.PathLike, bytes, "Ed25519PrivateKey"]
VerifyingKey: TypeAlias = Union[str, os.PathLike, bytes, "Ed25519PublicKey"]


def sign(manifest: bytes, key: SigningKey) -> bytes:
    """Return the signature, 64 bytes. Raises InputError if the key is not an Ed25519 private key."""
    return read_private_key(key).sign(manifest)


def read_private_key(key: SigningKey) -> Ed25519PrivateKey:
    """Return the key to sign with. Raises InputError if it is not an Ed25519 private key."""
    ed25519, serialization = _import_cryptography()
    load = serialization.load_pem_private_key
    return _read_key(key, "private", ed25519.Ed25519PrivateKey, "from_private_bytes", lambda text: load(text, None))


def verify(manifest: bytes, signature: bytes, key: VerifyingKey, where: Path) -> None:
    """Raise ArtifactError unless `manifest` was signed with the private half of `key`."""
    from cryptography.exceptions import InvalidSignature

    try:
        read_public_key(key).verify(signature, manifest)
    except InvalidSignature as error:
        raise ArtifactError(
            "signature.mismatch",
            f"'{where}' was not signed with this key, or its manifest has been changed since: do not use it.",
        ) from error


def read_public_key(key: VerifyingKey) -> Ed25519PublicKey:
    """Return the key to verify with. Raises InputError if it is not an Ed25519 public key."""
    ed25519, serialization = _import_cryptography()
    return _read_key(key, "public", ed25519.Ed25519PublicKey, "from_public_bytes", serialization.load_pem_public_key)


def _import_cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise InputError(
            "signature.package_missing", f"signatures need a package: {describe_missing_package('cryptography')}"
        ) from error
    return ed25519, serialization


def _read_key(key: Any, role: str, key_type: type, from_bytes: str, from_pem: Any) -> Any:
    if isinstance(key, key_type):
        return key
    hint = f"Pass a PEM file with the {role} half of an Ed25519 key, or its 32 bytes."
    try:
        if isinstance(key, bytes):
            return getattr(key_type, from_bytes)(key)
        key_object = from_pem(Path(key).read_bytes())
    except OSError as error:
        raise InputError(
            "signature.key_unreadable", f"the {role} key '{key}' cannot be read: {error.strerror}. {hint}"
        ) from error
    except Exception as error:  # encrypted, of another algorithm, not a key, or not a path
        name = f"'{key}'" if isinstance(key, (str, os.PathLike)) else f"a {type(key).__name__}"
        raise InputError("signature.key_invalid", f"{name} is not a {role} key of Ed25519. {hint}") from error
    if not isinstance(key_object, key_type):
        raise InputError("signature.key_invalid", f"'{key}' is not a {role} key of Ed25519. {hint}")
    return key_object
