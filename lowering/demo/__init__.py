"""The demo: a decoder is built, compiled, saved, loaded where no compiler is, and generates tokens."""

from .run import demo as demo
