"""The demo: a decoder is built, compiled and saved, then loaded without a compiler, and generates tokens."""

from .run import demo as demo
