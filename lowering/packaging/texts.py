"""The texts of a shipped folder: README.md, CMakeLists.txt, NOTICE."""

from __future__ import annotations

import shlex

from ..manifest import Manifest
from .libraries import Libraries

_README = """\
# A compiled model and all it needs

`model/` is an artifact of onnx-lowering, `lib/` the libraries that run it, `include/` their headers, and `main.cc` an
application of one page: change it, or take from it. No Python and no compiler of models is needed.

{tensors}

Built for {target}.{needs}

## Build and run

```
{command}
./host model{example}
```

or with CMake, `cmake -B build && cmake --build build && build/host model{example}`. An application of CMake says
`add_subdirectory(this_folder)` and `target_link_libraries(application lowering::model)`.

It runs on {machine}. On a machine of another kind it is built by a cross compiler, `{machine}-linux-gnu-g++` in place
of `g++` (Debian's g++-{debian}-linux-gnu), or with CMake

```
cmake -B build -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR={machine} -DCMAKE_CXX_COMPILER={machine}-linux-gnu-g++
```

and carried over with its folder.

`model/host.hpp` says what there is in C++, `model/model.h` which inputs and outputs. `host` finds `lib/` beside itself.
`licenses/` and NOTICE hold the terms of what is not yours.
"""

_GPU = """

GPUs need more than is here, under terms of NVIDIA: driver 580 or later, and the CUDA runtime, libcudart.so.13
(of CUDA's installer or of the wheel nvidia-cuda-runtime 13), where the linker finds it, for instance by
LD_LIBRARY_PATH."""

_CMAKE = """\
# lowering::model is the model's headers and the libraries that run it; `host` is built where this is the whole project.
cmake_minimum_required(VERSION 3.13)
project(lowering_model LANGUAGES CXX)

find_package(Threads REQUIRED)
add_library(lowering_model INTERFACE)
add_library(lowering::model ALIAS lowering_model)
target_compile_features(lowering_model INTERFACE cxx_std_17)
target_include_directories(lowering_model INTERFACE
  "${{CMAKE_CURRENT_SOURCE_DIR}}/model" "${{CMAKE_CURRENT_SOURCE_DIR}}/include")
# They are loaded for what they register, not for symbols that the application names.
target_link_libraries(lowering_model INTERFACE {options}
  {libraries} Threads::Threads)

if(CMAKE_SOURCE_DIR STREQUAL CMAKE_CURRENT_SOURCE_DIR)
  add_executable(host main.cc)
  target_link_libraries(host PRIVATE lowering::model)
  set_target_properties(host PROPERTIES BUILD_RPATH "$ORIGIN/../lib")  # from build/, where the folder is moved to
endif()
"""

_NOTICE = """\
model/host.hpp, main.cc and CMakeLists.txt are part of onnx-lowering, Apache License 2.0: LICENSE.
model/weights.bin and what model/model.so computes are of the model that was compiled, and under its terms.

lib/ and include/ are of other projects, unchanged; their terms are in licenses/:
{packages}
"""


def format_readme(manifest: Manifest, machine: str) -> str:
    """Return README.md; machine is that of the libraries, such as `x86_64`."""
    tensors = [f"* input `{t}`" for t in manifest.inputs] + [f"* output `{t}`" for t in manifest.outputs]
    dims = dict.fromkeys(d for t in manifest.inputs for d in t.dims if isinstance(d, str))
    return _README.format(
        tensors="\n".join(tensors),
        target=manifest.target,
        needs=_GPU if manifest.architectures else "",
        command=format_build_command(manifest),
        machine=machine,
        debian=machine.replace("_", "-"),
        example="".join(" " + shlex.quote(f"{dim}={manifest.ranges.get(dim, (1, 1))[0]}") for dim in dims),
    )


def format_build_command(manifest: Manifest) -> str:
    """Return the command that compiles main.cc in the shipped folder."""
    libraries_flags = " ".join(f"-l{name}" for name in list_library_names(manifest))
    flags = f"-Llib {' '.join(list_link_options(manifest))} {libraries_flags} '-Wl,-rpath,$ORIGIN/lib'"
    return f"g++ -std=c++17 -O2 -pthread main.cc -o host -Imodel -Iinclude {flags}"


def format_cmake(manifest: Manifest) -> str:
    paths = [f'"${{CMAKE_CURRENT_SOURCE_DIR}}/lib/lib{name}.so"' for name in list_library_names(manifest)]
    return _CMAKE.format(options=" ".join(list_link_options(manifest)), libraries="\n  ".join(paths))


def format_notice(libraries: Libraries) -> str:
    """Return NOTICE: the owners of the files, and the notices that licenses require to be passed on."""
    packages = "\n".join(f"* {name} {version}" for name, version in libraries.versions.items())
    notices = [text.decode().strip() for name, text in libraries.licenses.items() if name.endswith("NOTICE")]
    return "\n\n".join([_NOTICE.format(packages=packages).strip(), *notices]) + "\n"


def list_library_names(manifest: Manifest) -> list[str]:
    return ["tvm_ffi", "tvm_runtime", *(["tvm_runtime_cuda"] if manifest.architectures else [])]


def list_link_options(manifest: Manifest) -> list[str]:
    """Return linker options; a machine that builds an application for GPUs may lack a driver."""
    unresolved = ["-Wl,--unresolved-symbols=ignore-in-shared-libs"] if manifest.architectures else []
    return ["-Wl,--no-as-needed", *unresolved]
