"""Devices, cost models, PTX instructions and tiles in shared memory."""
