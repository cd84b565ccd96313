"""Kernels and models on a GPU compared with others': `python -m benchmarks cuda`.

`build` needs the compiler: `build.cases` and `build.sweeps` say what is measured, `build.kernels` makes the kernels,
`build.models`, `llama`, `weights`, `flexes` and `decoders` make artifacts, and `build.bundle` writes all of it into a
folder. `host` travels with that folder, and needs NumPy, PyTorch and the runtime alone: `host.measure` works through
the jobs of `host.jobs`, each in a process of its own. Every kernel is compared with float64 (`check`) before `contest`
times it and `peers`; artifacts are measured by `programs`, `flex` and `decoding`. `host.card` is the GPU, or its
stand-in in a rehearsal, and `host.memory` lets the same check run on arrays of NumPy and of PyTorch.
`plan` is the record that travels, `results` the file that comes back, and `report` reads both.
"""
