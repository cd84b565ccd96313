"""Exceptions. Their texts tell the user the problem, its location, the reason and the remedy."""

from __future__ import annotations


class LoweringError(Exception):
    """Base class of all errors that this package raises intentionally."""


class ModelError(LoweringError):
    """The file is not a legal ONNX model, or cannot be read."""


class NodeError(LoweringError):
    """A node cannot be lowered.

    `where` names the node as ONNX does (domain, operator, version, node name), `what` is the attribute, input or rule
    that is not supported, and `remedy` is the action for the user.
    """

    def __init__(self, where: str, what: str, remedy: str = "") -> None:
        self.where, self.what, self.remedy = where, what, remedy
        super().__init__(f"{where}: {what}" + (f" {remedy}" if remedy else ""))


class CompilerError(LoweringError):
    """The compiler failed by a bug of its own, not by a problem of the model."""


class TargetError(LoweringError):
    """The target is unknown, or this machine cannot build for it."""


class ArtifactError(LoweringError):
    """A saved module is damaged, too new, or compiled for another machine."""


class InputError(LoweringError):
    """An array passed to a compiled module has the wrong name, type, shape or memory."""
