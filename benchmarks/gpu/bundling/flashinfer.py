"""FlashInfer's decode kernel for one sequence as a library, where the package flashinfer-python is installed.

The package binds its kernels by apache-tvm-ffi, as this repository does, so that `tvm_ffi.load_module` loads them. Its
sources are filled in here, not by its own build system, which needs a GPU's PyTorch.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

from tvm_ffi import libinfo

from lowering.machine import find_nvcc

PACKAGE = "flashinfer-python"
HEAD_DIM = 128
PREFIX = "flashinfer-"

_SOURCES = ("single_decode.cu", "single_decode_jit_binding.cu")
_TEMPLATES = {
    "single_decode_customize_config.jinja": "single_decode_config.inc",
    "single_decode_kernel_inst.jinja": "single_decode_kernel.cu",
}
_SCALARS = ("logits_soft_cap", "sm_scale", "rope_rcp_scale", "rope_rcp_theta")
_FLAGS = ("-O3", "-std=c++20", "-shared", "-Xcompiler", "-fPIC", "-cudart", "shared", "--expt-relaxed-constexpr", "-w")


def build_decode(folder: Path, arch: str) -> tuple[str, str]:
    """Build the library of float16 heads of HEAD_DIM into `folder`.

    Returns its name and "", or "" and why there is none.
    """
    spec = importlib.util.find_spec("flashinfer")
    nvcc = find_nvcc()
    if spec is None or spec.origin is None:
        return "", f"the package {PACKAGE} was not installed where the bundle was written"
    if nvcc is None or importlib.util.find_spec("jinja2") is None:
        return "", f"{PACKAGE} needs nvcc and jinja2 to be compiled where the bundle is written"
    data = Path(spec.origin).parent / "data"
    version = metadata.version(PACKAGE)
    digest = hashlib.sha256(f"{version} {arch} {_FLAGS} {_fields()}".encode()).hexdigest()[:12]
    library = folder / f"{PREFIX}decode-{digest}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory() as temporary:
            sources = _write_sources(data / "csrc", Path(temporary))
            built = Path(temporary) / "library.so"
            code = f"arch=compute_{arch.removeprefix('sm_')},code={arch}"
            command = [nvcc, *_FLAGS, "-gencode", code, *_includes(data), *map(str, sources), "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                return "", f"{PACKAGE} {version} does not compile: {done.stderr.strip()[:300]}"
            library.write_bytes(built.read_bytes())
    return library.name, ""


def _fields() -> dict[str, str]:
    """Fields of the package's templates: plain attention, without positions, windows or caps."""
    return {
        "additional_func_params": ", Optional<ffi::Tensor> maybe_alibi_slopes"
        + "".join(f", double {name}" for name in _SCALARS),
        "additional_params_decl": "float* maybe_alibi_slopes;\n" + "".join(f"float {name};\n" for name in _SCALARS),
        "additional_params_setter": " \\\n".join(
            (
                "params.maybe_alibi_slopes = nullptr;",
                *(f"params.{name} = static_cast<float>({name});" for name in _SCALARS),
            )
        ),
        "variant_decl": "#include <flashinfer/attention/variants.cuh>",
        "variant_name": "DefaultAttention<false, false, false, false>",
        **dict.fromkeys(("dtype_q", "dtype_kv", "dtype_o"), "half"),
        **dict.fromkeys(("head_dim_qk", "head_dim_vo"), str(HEAD_DIM)),
        "pos_encoding_mode": "PosEncodingMode::kNone",
        "use_sliding_window": "false",
        "use_logits_soft_cap": "false",
    }


def _write_sources(csrc: Path, target_folder: Path) -> list[Path]:
    """Write the sources with their templates filled in; return those that are compiled."""
    import jinja2

    for name in _SOURCES:
        (target_folder / name).write_text((csrc / name).read_text())
    for template, name in _TEMPLATES.items():
        (target_folder / name).write_text(jinja2.Template((csrc / template).read_text()).render(_fields()))
    return sorted(target_folder.glob("*.cu"))


def _includes(data: Path) -> list[str]:
    folders = [data / "include", data / "csrc", *sorted((data / "cccl").rglob("include"))]
    folders += [data / "cutlass" / "include", data / "spdlog" / "include"]
    own = [libinfo.find_include_path(), libinfo.find_dlpack_include_path()]
    return [f"-I{path}" for path in (*folders, *own)]
