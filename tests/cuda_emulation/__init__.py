"""CUDA kernels on the CPU, for tests: see README.md in this folder."""

from . import card
from .accesses import Access, factor
from .device import ARRIVALS, ORDERS, Arrivals, Order
from .kernels import Module, call, module
from .launch import Pointer, TensorMap, launch
from .worker import EmulationError, counting, run

__all__ = [
    "ARRIVALS",
    "ORDERS",
    "Access",
    "Arrivals",
    "EmulationError",
    "Module",
    "Order",
    "Pointer",
    "TensorMap",
    "call",
    "counting",
    "counts",
    "factor",
    "launch",
    "module",
    "run",
]


def counts() -> bool:
    """Return whether calls of the driver, accesses to memory and matmuls are counted: a real GPU counts none."""
    return not card.is_used()
