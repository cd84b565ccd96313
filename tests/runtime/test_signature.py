"""Signed artifacts, for those who load what others have made."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

import lowering
from lowering.manifest import Manifest
from lowering.runtime.artifact import checks
from tests.support.error_codes import raises

PRIVATE = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = PRIVATE.public_key()
OTHER = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32)).public_key()
X = np.ones((2, 64), "f")


def pem(key: Any) -> bytes:
    encoding = serialization.Encoding.PEM
    if hasattr(key, "public_key"):
        plain = serialization.NoEncryption()
        return key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain)
    return key.public_bytes(encoding, serialization.PublicFormat.SubjectPublicKeyInfo)


@pytest.fixture
def folder(artifact: Callable[..., Path], tmp_path: Path) -> Path:
    lowering.load(artifact("dense")).save(tmp_path / "out", sign_key=PRIVATE)
    return tmp_path / "out"


def test_every_form_of_a_key(folder: Path, artifact: Callable[..., Path], tmp_path: Path) -> None:
    files = {}
    for name, key in (("private", PRIVATE), ("public", PUBLIC)):
        files[name] = tmp_path / f"{name}.pem"
        files[name].write_bytes(pem(key))
    signature = (folder / "manifest.sig").read_bytes()
    for key in (files["private"], str(files["private"]), PRIVATE.private_bytes_raw(), PRIVATE):
        lowering.load(artifact("dense")).save(folder, sign_key=key)
        assert (folder / "manifest.sig").read_bytes() == signature
    for key in (files["public"], str(files["public"]), PUBLIC.public_bytes_raw(), PUBLIC):
        np.testing.assert_array_equal(
            lowering.load(folder, verify_key=key).run({"x": X})["y"], lowering.load(folder).run({"x": X})["y"]
        )


def test_a_copy_keeps_the_signature(folder: Path, tmp_path: Path) -> None:
    lowering.load(folder).save(tmp_path / "copy")
    lowering.load(tmp_path / "copy", verify_key=PUBLIC)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_openssl_agrees(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "key.pub").write_bytes(pem(PUBLIC))
    command = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", tmp_path / "key.pub", "-rawin"]
    subprocess.run([*command, "-in", folder / "manifest.json", "-sigfile", folder / "manifest.sig"], check=True)


def test_what_is_not_signed_with_the_key(folder: Path, artifact: Callable[..., Path]) -> None:
    with raises("artifact.signature_missing"):
        lowering.load(artifact("dense"), verify_key=PUBLIC)
    with raises("signature.mismatch"):
        lowering.load(folder, verify_key=OTHER)
    for signature in (b"", bytes(64), b"x" * 100):
        (folder / "manifest.sig").write_bytes(signature)
        with raises("signature.mismatch"):
            lowering.load(folder, verify_key=PUBLIC)


def test_new_digests_do_not_help(folder: Path) -> None:
    """An attacker can make all digests right."""
    path = folder / "manifest.json"
    manifest = Manifest.from_dict(json.loads(path.read_text()))
    (folder / "model.h").write_text("#error other text")
    for hashes in ({}, {"model.h": "f" * 64}):
        path.write_text(manifest.to_json().replace(manifest.hashes["model.h"], hashes.get("model.h", "0" * 64)))
        with raises("signature.mismatch"):
            lowering.load(folder, verify_key=PUBLIC)


@pytest.mark.parametrize("name", ["model.so", "weights.bin", "model.h", "host.hpp"])
def test_every_file_is_covered(name: str, folder: Path) -> None:
    path = folder / name
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    with raises("artifact.file_changed"):
        lowering.load(folder, verify_key=PUBLIC)


def test_a_signed_load_reads_all_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples, of what is large, would miss a change between them."""
    from tests.runtime import modules

    shape = (5, 2**20)
    outputs = [modules.spec("w", "float32", *shape)]
    built = modules.build(tmp_path / "m", [], outputs, lambda b, i, w: w, {"w": np.zeros(shape, "f")})
    lowering.load(built).save(tmp_path / "out", sign_key=PRIVATE)
    path = tmp_path / "out" / "weights.bin"
    data = bytearray(path.read_bytes())
    data[2**20 + 2**16] = 1
    path.write_bytes(data)
    monkeypatch.setattr(checks, "SMALL", 0)
    monkeypatch.setattr(checks, "_SAMPLED", 2)
    lowering.load(tmp_path / "out")
    with raises("artifact.file_changed"):
        lowering.load(tmp_path / "out", verify_key=PUBLIC)


def test_what_is_no_key(folder: Path, tmp_path: Path) -> None:
    module = lowering.load(folder)
    curve = tmp_path / "curve.pem"
    curve.write_bytes(pem(ec.generate_private_key(ec.SECP256R1())))
    locked = tmp_path / "locked.pem"
    password = serialization.BestAvailableEncryption(b"secret")
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    locked.write_bytes(PRIVATE.private_bytes(encoding, form, password))
    for key in (b"short", curve, locked, PUBLIC, 5, folder / "model.h"):
        with raises("signature.key_invalid"):
            module.save(tmp_path / "no", sign_key=key)
    for key in (b"", curve, PRIVATE, 5.0):
        with raises("signature.key_invalid"):
            lowering.load(folder, verify_key=key)
    with raises("signature.key_unreadable"):
        module.save(tmp_path / "no", sign_key=tmp_path / "nowhere")
    assert not (tmp_path / "no").exists()


def test_without_the_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    with raises("signature.package_missing"):
        lowering.load(folder, verify_key=PUBLIC)
    lowering.load(folder)
