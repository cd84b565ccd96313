"""CUDA kernels on the CPU, for tests: see README.md beside this file."""

from .device import ARRIVALS, ORDERS, Arrivals, Order
from .kernels import Module, call, module
from .launch import TensorMap, launch
from .worker import EmulationError, run

__all__ = [
    "ARRIVALS",
    "ORDERS",
    "Arrivals",
    "EmulationError",
    "Module",
    "Order",
    "TensorMap",
    "call",
    "launch",
    "module",
    "run",
]
