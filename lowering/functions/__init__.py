"""Operators as Python functions over arrays, compiled at the first call of each configuration."""

from .gpt_attention import gpt_attention

__all__ = ["gpt_attention"]
