"""Kernels on a GPU beside PyTorch: `python -m benchmarks cuda`.

Where the compiler is, `cases` says what is measured, `kernels` and `models` make it, `bundle` builds it into a folder.
Where the GPU is, `measure` works through that folder, with NumPy, PyTorch and the runtime alone: `check` compares every
kernel with float64 (`attention`, `product`, `update`) before `contest` times it beside `peers`; `decoding` times the
step of a decoder, whose weights (`llama`) are `drawn` there; `report` reads what was found.
`plan` is the record that travels, and `memory` lets the same check run on arrays of NumPy and of PyTorch.
"""
