"""Passes, memory plans and caches of compiled code."""
