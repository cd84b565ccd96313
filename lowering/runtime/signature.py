"""Ed25519 signatures of artifacts, for those who load what others have made.

A signature is of the bytes of manifest.json, which holds the SHA-256 of every other file. `openssl` knows it too:

    openssl genpkey -algorithm ed25519 -out key.pem
    openssl pkey -in key.pem -pubout -out key.pub
    openssl pkeyutl -verify -pubin -inkey key.pub -rawin -in manifest.json -sigfile manifest.sig
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from ..errors import ArtifactError, InputError
from ..machine import not_installed

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

# A PEM file, the key's 32 bytes, or a key of the package `cryptography`.
SigningKey: TypeAlias = Union[str, os.PathLike, bytes, "Ed25519PrivateKey"]
VerifyingKey: TypeAlias = Union[str, os.PathLike, bytes, "Ed25519PublicKey"]


def sign(manifest: bytes, key: SigningKey) -> bytes:
    """The signature, 64 bytes. Raises InputError for what is no private key of Ed25519."""
    return private_key(key).sign(manifest)


def private_key(key: SigningKey) -> Ed25519PrivateKey:
    """The key to sign with. Raises InputError for what is none."""
    ed25519, serialization = _package()
    load = serialization.load_pem_private_key
    return _key(key, "private", ed25519.Ed25519PrivateKey, "from_private_bytes", lambda text: load(text, None))


def verify(manifest: bytes, signature: bytes, key: VerifyingKey, where: Path) -> None:
    """Raises ArtifactError unless the signature was made of `manifest` with the private half of `key`."""
    from cryptography.exceptions import InvalidSignature

    try:
        public_key(key).verify(signature, manifest)
    except InvalidSignature as error:
        raise ArtifactError(
            f"'{where}' was not signed with this key, or its manifest has been changed since: do not use it."
        ) from error


def public_key(key: VerifyingKey) -> Ed25519PublicKey:
    """The key to verify with. Raises InputError for what is none."""
    ed25519, serialization = _package()
    return _key(key, "public", ed25519.Ed25519PublicKey, "from_public_bytes", serialization.load_pem_public_key)


def _package() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise InputError(f"signatures need a package: {not_installed('cryptography')}") from error
    return ed25519, serialization


def _key(key: Any, half: str, kind: type, from_bytes: str, from_pem: Any) -> Any:
    if isinstance(key, kind):
        return key
    hint = f"Pass a PEM file with the {half} half of an Ed25519 key, or its 32 bytes."
    try:
        if isinstance(key, bytes):
            return getattr(kind, from_bytes)(key)
        found = from_pem(Path(key).read_bytes())
    except OSError as error:
        raise InputError(f"the {half} key '{key}' cannot be read: {error.strerror}. {hint}") from error
    except Exception as error:  # a key with a password, of an unknown algorithm, no key, no path
        name = f"'{key}'" if isinstance(key, (str, os.PathLike)) else f"a {type(key).__name__}"
        raise InputError(f"{name} is no {half} key of Ed25519. {hint}") from error
    if not isinstance(found, kind):
        raise InputError(f"'{key}' is no {half} key of Ed25519. {hint}")
    return found
