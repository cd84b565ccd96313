"""Checks that must pass before an artifact is loaded. Each rejection is one plain sentence."""

from __future__ import annotations

import json
import operator
import platform
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

from ...errors import ArtifactError, InputError
from ...machine import SHIPPED, VERSION_FILE, runtime_alone
from ...machine import cpu_flags as cpu_flags
from ...manifest import (
    BLOCK,
    FILE,
    FORMAT,
    MAX_THREADS,
    SIGNATURE,
    WEIGHTS,
    Manifest,
    SlotCaches,
    compute_block_digests,
    digest,
)
from .files import ArtifactFiles
from .manifest_rules import find_contradictions
from .signature import VerifyingKey, verify

# e_machine of the ELF header, by platform.machine().
_ELF_MACHINES = {"x86_64": 62, "aarch64": 183}


_SIGNATURE_BYTES = 64

SMALL = 2**30
"""Weights of at most so many bytes are checked completely at every load."""
_SAMPLED = 2**8  # blocks that are checked of larger weights


def check_integer(value: Any, name: str, minimum: int, maximum: int) -> int:
    """Return the Python int equal to `value`, which may be a NumPy integer.

    Raises InputError for other types and for values out of bounds.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or not minimum <= number <= maximum:
        raise InputError(
            "argument.integer_invalid", f"{name} must be a whole number from {minimum} to {maximum}, not {value!r}."
        )
    return number


def check_dimensions(requested: Iterable[str], symbolic: Iterable[str]) -> None:
    """Raise InputError for a name that is not a symbolic dimension of the inputs."""
    names = sorted(symbolic)
    for name in requested:
        if name not in names:
            raise InputError(
                "dims.name_unknown",
                f"no input has a symbolic dimension '{name}'. There are: {', '.join(names) or 'none'}.",
            )


def check_fixed_dimensions(sizes: Mapping[str, int], ranges: Mapping[str, tuple[int, int]]) -> None:
    """Raise InputError if a size differs from the one that `compile` fixed the dimension to."""
    for name, (low, high) in ranges.items():
        if low == high and (size := sizes.get(name, low)) != low:
            raise InputError(
                "dims.static_size_mismatch",
                f"dimension '{name}' was compiled with the static size {low}, and {size} was given: leave it out, "
                f"or compile the model again with --dim {shlex.quote(f'{name}={size}')}.",
            )


def check_threads(threads: Any) -> int | None:
    """Return the number of threads of a call; None means all CPUs available to its thread. Raises InputError."""
    return None if threads is None else check_integer(threads, "threads", 1, MAX_THREADS)


def read_manifest(files: ArtifactFiles, key: VerifyingKey | None = None) -> Manifest:
    """Return the manifest of an artifact of this format, unchanged since it was written.

    With a key, the signature is verified before anything else is trusted. Raises ArtifactError.
    """
    path = files.folder / FILE
    if FILE not in files:
        raise ArtifactError(
            "artifact.manifest_missing",
            f"'{files.folder}' is not an artifact: it has no {FILE}. Pass a folder that `onnx-lowering compile` wrote.",
        )
    text = files.read(FILE)
    if key is not None:
        if SIGNATURE not in files:
            raise ArtifactError(
                "artifact.signature_missing",
                f"'{files.folder}' is not signed: it has no {SIGNATURE}. Sign it, or load it without a key.",
            )
        verify(text, files.read(SIGNATURE, count=_SIGNATURE_BYTES + 1), key, files.folder)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArtifactError("artifact.file_damaged", f"'{path}' cannot be read: {error}.") from error
    version = data.get("format") if isinstance(data, dict) else None
    if version != FORMAT:
        raise ArtifactError(
            "artifact.format_mismatch",
            f"'{files.folder}' has artifact format {str(version)[:20]}{_compare_format(version)}, and this version of "
            f"onnx-lowering reads format {FORMAT}: {_explain_upgrade(version)}compile the model again.",
        )
    try:
        manifest = Manifest.from_dict(data)
    except ValueError as error:
        raise ArtifactError(
            "artifact.file_damaged", f"'{path}' is damaged: {error}. Compile the model again."
        ) from error
    if manifest.hashes.get(FILE) != manifest.digest():
        raise ArtifactError(
            "artifact.file_changed", f"'{path}' has been changed since it was written: compile the model again."
        )
    contradiction = next(find_contradictions(manifest), None)
    if contradiction is not None:
        raise ArtifactError(
            "artifact.file_damaged", f"'{path}' is damaged: it says that {contradiction}. Compile the model again."
        )
    return manifest


def _compare_format(version: Any) -> str:
    """Return whether an artifact's format is older or newer than the one that is read."""
    if type(version) is not int:
        return ""
    return ", which is older" if version < FORMAT else ", which is newer"


def _explain_upgrade(version: Any) -> str:
    return "install a newer one, or " if type(version) is int and version > FORMAT else ""


def check_files(files: ArtifactFiles, manifest: Manifest) -> dict[str, bytes]:
    """Return the contents of all files except weights and manifest, which must match their digests.

    Of the weights only the file size is checked here: `check_weights` checks the bytes that were read. Raises
    ArtifactError.
    """
    for name in manifest.hashes:
        if name not in files:
            path = files.folder / name
            raise ArtifactError(
                "artifact.file_missing", f"'{path}' is missing: copy the whole folder, or compile the model again."
            )
    contents = {name: files.read(name) for name in manifest.hashes if name not in (FILE, WEIGHTS)}
    for name, content in contents.items():
        if digest(content) != manifest.hashes[name]:
            raise _create_changed_error(files, name)
    if WEIGHTS in manifest.hashes:
        weights = [weight for model in manifest.parts() for weight in model.weights]
        size, needed = files.size(WEIGHTS), max((w.offset + w.nbytes for w in weights), default=0)
        if size < needed:
            raise ArtifactError(
                "artifact.file_truncated",
                f"'{files.folder / WEIGHTS}' has {size} bytes of {needed}: copy the whole folder, or compile the model "
                "again.",
            )
    return contents


def check_weights(
    files: ArtifactFiles,
    manifest: Manifest,
    size: int,
    read: Callable[[int, int], bytes | memoryview],
    is_full_check: bool,
) -> None:
    """Raise ArtifactError unless weights of `size` bytes match the digests in the manifest.

    read(position, count) returns bytes. Without `is_full_check`, only a sample of blocks is checked of weights larger
    than SMALL bytes. The sample includes the first and the last block.
    """
    count = -(-size // BLOCK)
    if count != len(manifest.weights_blocks):
        raise _create_changed_error(files, WEIGHTS, f"it has {size} bytes")
    step = 1 if is_full_check or size <= SMALL else -(-count // _SAMPLED)
    blocks = sorted({*range(0, count, step), *range(count)[-1:]})
    for block, digest_of_block in zip(blocks, compute_block_digests(size, read, blocks)):
        if digest_of_block != manifest.weights_blocks[block]:
            raise _create_changed_error(files, WEIGHTS, f"bytes from {block * BLOCK} on differ")


def _create_changed_error(files: ArtifactFiles, name: str, what: str = "") -> ArtifactError:
    return ArtifactError(
        "artifact.file_changed",
        f"'{files.folder / name}' is not the file that {FILE} was written with{what and f' ({what})'}: "
        "copy the whole folder, or compile the model again.",
    )


def check_versions(manifest: Manifest) -> None:
    """Raise ArtifactError if the installed runtime has another binary interface than the artifact's.

    Both packages change it with the minor version (tvm-ffi: "0.X.Y where X breaks the C ABI").
    """
    for package in ("apache-tvm", "apache-tvm-ffi"):
        try:
            installed = metadata.version(package)
        except metadata.PackageNotFoundError:
            if package != "apache-tvm" or not runtime_alone():
                continue  # libraries without a wheel
            installed = (SHIPPED / VERSION_FILE).read_text()
        check_version(manifest, package, installed)


def check_version(manifest: Manifest, package: str, installed: str) -> None:
    """Raise ArtifactError unless the artifact accepts that version of a package.

    It does if the first two numbers equal those of the version that it was built with.
    """
    required = manifest.versions.get(package)
    if required is not None and required.split(".")[:2] != installed.split(".")[:2]:
        raise ArtifactError(
            "artifact.version_mismatch",
            f"the artifact was built with {package} {required} and {installed} is installed: "
            f"install {package}=={required}, or compile the model again.",
        )


def check_machine(code: bytes, features: Sequence[str], target: str, what: str, remedy: str) -> None:
    """Raise ArtifactError if this machine cannot run the code of `what`.

    The reason is another architecture, or missing CPU features.
    """
    elf_machine = int.from_bytes(code[18:20], "little")
    here = platform.machine()
    if elf_machine != _ELF_MACHINES.get(here):
        built_for = next(
            (name for name, number in _ELF_MACHINES.items() if number == elf_machine), f"machine {elf_machine}"
        )
        raise ArtifactError(
            "artifact.architecture_mismatch",
            f"{what} was built for {built_for} ({target}) and this machine is {here}. Use it on such a "
            "machine, or build it for this one.",
        )
    missing = [f for f in features if f not in cpu_flags()]
    if missing:
        raise ArtifactError(
            "artifact.cpu_features_missing",
            f"{what} was built for a CPU with {', '.join(missing)}, which this one lacks: {remedy}",
        )


def check_slot_capacity(slots: SlotCaches, length: Any, rows: int) -> None:
    """Raise InputError if the new rows exceed the slots of the caches."""
    used = int(length)
    if used < 0 or used + rows > slots.capacity:
        raise InputError(
            "static_cache.capacity_exceeded",
            f"the caches have {slots.capacity} slots: {used} tokens are in them ('{slots.length}') and {rows} more do "
            "not fit. Compile with a larger static_cache.",
        )
    if slots.rows is not None and rows > slots.rows:
        raise InputError(
            "static_cache.rows_exceeded",
            f"a call adds at most {slots.rows} tokens, since some caches store only the newest ones, and this one adds "
            f"{rows}. Make several calls, as a decoder does.",
        )
