"""What must hold before an artifact is loaded; each refusal is one plain sentence."""

from __future__ import annotations

import json
import operator
import platform
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

from ..errors import ArtifactError, InputError
from ..machine import SHIPPED, VERSION_FILE, runtime_alone
from ..machine import cpu_flags as cpu_flags
from ..manifest import (
    BLOCK,
    FILE,
    FORMAT,
    MOST_THREADS,
    SIGNATURE,
    WEIGHTS,
    Manifest,
    SlotCaches,
    block_digests,
    digest,
)
from .files import Files
from .rules import contradictions
from .signature import VerifyingKey, verify

# e_machine of the ELF header, by platform.machine().
_ELF_MACHINES = {"x86_64": 62, "aarch64": 183}


_SIGNATURE = 64  # bytes of one

SMALL = 2**30
"""Bytes of weights of which every load looks at all."""
_SAMPLED = 2**8  # blocks of more


def whole_number(value: Any, name: str, least: int, most: int) -> int:
    """The Python int equal to `value`, which may be NumPy's. Raises InputError for other types and out of bounds."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise InputError(f"{name} must be a whole number from {least} to {most}, not {value!r}.")
    return number


def check_dimensions(given: Iterable[str], known: Iterable[str]) -> None:
    """Raises InputError for a name that is none of the symbolic dimensions of the inputs."""
    names = sorted(known)
    for name in given:
        if name not in names:
            raise InputError(f"no input has a symbolic dimension '{name}'. There are: {', '.join(names) or 'none'}.")


def check_fixed(given: Mapping[str, int], ranges: Mapping[str, tuple[int, int]]) -> None:
    """Raises InputError for another size of a dimension than the one that `compile` fixed it to."""
    for name, (low, high) in ranges.items():
        if low == high and (size := given.get(name, low)) != low:
            raise InputError(
                f"dimension '{name}' was fixed to {low} when the model was compiled, and is not {size}: leave it out, "
                f"or compile the model again with --dim {shlex.quote(f'{name}={size}')}."
            )


def checked_threads(threads: Any) -> int | None:
    """The number of threads of a call, None for the CPUs that its thread may use. Raises InputError."""
    return None if threads is None else whole_number(threads, "threads", 1, MOST_THREADS)


def read_manifest(files: Files, key: VerifyingKey | None = None) -> Manifest:
    """The manifest of an artifact of this format, unchanged since it was written.

    With a key its signature is verified before anything else is believed.
    """
    path = files.folder / FILE
    if FILE not in files:
        raise ArtifactError(f"'{files.folder}' is no artifact: it has no {FILE}.")
    text = files.read(FILE)
    if key is not None:
        if SIGNATURE not in files:
            raise ArtifactError(f"'{files.folder}' is not signed: it has no {SIGNATURE}.")
        verify(text, files.read(SIGNATURE, count=_SIGNATURE + 1), key, files.folder)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"'{path}' cannot be read: {error}.") from error
    found = data.get("format") if isinstance(data, dict) else None
    if found != FORMAT:
        raise ArtifactError(
            f"'{files.folder}' has artifact format {str(found)[:20]}{_age(found)}, and this version of onnx-lowering "
            f"reads format {FORMAT}: {_remedy(found)}compile the model again."
        )
    try:
        manifest = Manifest.from_dict(data)
    except ValueError as error:
        raise ArtifactError(f"'{path}' is damaged: {error}. Compile the model again.") from error
    if manifest.hashes.get(FILE) != manifest.digest():
        raise ArtifactError(f"'{path}' has been changed since it was written: compile the model again.")
    wrong = next(contradictions(manifest), None)
    if wrong is not None:
        raise ArtifactError(f"'{path}' is damaged: it says that {wrong}. Compile the model again.")
    return manifest


def _age(found: Any) -> str:
    """How the format of an artifact compares with the one that is read."""
    if type(found) is not int:
        return ""
    return ", which is older" if found < FORMAT else ", which is newer"


def _remedy(found: Any) -> str:
    return "install a newer one, or " if type(found) is int and found > FORMAT else ""


def check_files(files: Files, manifest: Manifest) -> dict[str, bytes]:
    """The contents of all files but the weights and the manifest, which are there and as it was written with them.

    Of weights, that they are there: `check_weights` is for what has been read of them. Raises ArtifactError.
    """
    for name in manifest.hashes:
        if name not in files:
            path = files.folder / name
            raise ArtifactError(f"'{path}' is missing: copy the whole folder, or compile the model again.")
    contents = {name: files.read(name) for name in manifest.hashes if name not in (FILE, WEIGHTS)}
    for name, content in contents.items():
        if digest(content) != manifest.hashes[name]:
            raise _changed(files, name)
    if WEIGHTS in manifest.hashes:
        weights = [weight for part in manifest.parts() for weight in part.weights]
        size, needed = files.size(WEIGHTS), max((w.offset + w.nbytes for w in weights), default=0)
        if size < needed:
            raise ArtifactError(
                f"'{files.folder / WEIGHTS}' has {size} bytes of {needed}: copy the whole folder, or compile the model "
                "again."
            )
    return contents


def check_weights(
    files: Files, manifest: Manifest, size: int, read: Callable[[int, int], bytes | memoryview], whole: bool
) -> None:
    """Raises ArtifactError unless weights of `size` bytes are those that the manifest was written with.

    read(position, count) gives bytes. Unless `whole`, of more than SMALL bytes only some blocks are looked at, the
    first and the last among them.
    """
    count = -(-size // BLOCK)
    if count != len(manifest.weights_blocks):
        raise _changed(files, WEIGHTS, f"it has {size} bytes")
    step = 1 if whole or size <= SMALL else -(-count // _SAMPLED)
    blocks = sorted({*range(0, count, step), *range(count)[-1:]})
    for block, found in zip(blocks, block_digests(size, read, blocks)):
        if found != manifest.weights_blocks[block]:
            raise _changed(files, WEIGHTS, f"something from byte {block * BLOCK} on differs")


def _changed(files: Files, name: str, what: str = "") -> ArtifactError:
    return ArtifactError(
        f"'{files.folder / name}' is not the file that {FILE} was written with{what and f' ({what})'}: "
        "copy the whole folder, or compile the model again."
    )


def check_versions(manifest: Manifest) -> None:
    """Raises ArtifactError if the installed runtime speaks another binary interface than the artifact was built for.

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
    """Raises ArtifactError unless the artifact accepts that version of a package: it does where the first two numbers
    are those of the version that it was built with."""
    wanted = manifest.versions.get(package)
    if wanted is not None and wanted.split(".")[:2] != installed.split(".")[:2]:
        raise ArtifactError(
            f"the artifact was built with {package} {wanted} and {installed} is installed: "
            f"install {package}=={wanted}, or compile the model again."
        )


def check_machine(code: bytes, features: Sequence[str], target: str, what: str, remedy: str) -> None:
    """Raises ArtifactError if this machine cannot run the code of `what`: another architecture, or missing CPU
    features."""
    machine = int.from_bytes(code[18:20], "little")
    here = platform.machine()
    if machine != _ELF_MACHINES.get(here):
        built = next((name for name, number in _ELF_MACHINES.items() if number == machine), f"machine {machine}")
        raise ArtifactError(f"{what} was built for {built} ({target}) and this machine is {here}.")
    missing = [f for f in features if f not in cpu_flags()]
    if missing:
        raise ArtifactError(f"{what} was built for a CPU with {', '.join(missing)}, which this one lacks: {remedy}")


def check_room(slots: SlotCaches, length: Any, rows: int) -> None:
    """Raises InputError for rows that the caches have no slots for."""
    used = int(length)
    if used < 0 or used + rows > slots.capacity:
        raise InputError(
            f"the caches have {slots.capacity} slots: {used} tokens are in them ('{slots.length}') and {rows} more do "
            "not fit. Compile with a larger static_cache."
        )
    if slots.rows is not None and rows > slots.rows:
        raise InputError(
            f"a call adds at most {slots.rows} tokens, since some caches hold the newest ones alone, and this one adds "
            f"{rows}. Make several calls, as a decoder does."
        )
