"""What can go wrong, in words a user can act on: what, where, why and what to do."""

from __future__ import annotations


class LoweringError(Exception):
    """Base of every error this package raises on purpose."""


class ModelError(LoweringError):
    """The file is no legal ONNX model, or cannot be read."""


class NodeError(LoweringError):
    """One node cannot be lowered.

    `where` names the node as ONNX does (domain, operator, version, node name), `what` is the attribute, input or rule
    that blocks it, `remedy` is what the user can do.
    """

    def __init__(self, where: str, what: str, remedy: str = "") -> None:
        self.where, self.what, self.remedy = where, what, remedy
        super().__init__(f"{where}: {what}" + (f" {remedy}" if remedy else ""))


class CompilerError(LoweringError):
    """The compiler failed by a fault of its own, not of the model."""


class TargetError(LoweringError):
    """The target is unknown, or this machine cannot build for it."""


class ArtifactError(LoweringError):
    """A saved module is damaged, too new, or made for another machine."""


class InputError(LoweringError):
    """An array passed to a compiled module has the wrong name, type, shape or memory."""
