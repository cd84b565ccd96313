"""CUDA kernels on the CPU, for tests: see README.md beside this file."""

from .device import ARRIVALS, ORDERS, set_arch, set_order
from .kernels import Module, call, module
from .worker import EmulationError, run

__all__ = ["ARRIVALS", "ORDERS", "EmulationError", "Module", "call", "module", "run", "set_arch", "set_order"]
