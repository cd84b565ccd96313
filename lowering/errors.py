"""Exceptions. Their texts tell the user the problem, its location, the reason and the remedy."""

from __future__ import annotations


class LoweringError(Exception):
    """Base class of all errors that this package raises intentionally.

    `code` identifies the cause, such as "attention.heads_not_divisible". Codes are stable: programs match codes, since
    texts change. docs/reference/error_codes.md lists all of them.
    """

    def __init__(self, code: str, text: str) -> None:
        self.code, self.text = code, text  # self.args stays as given, by which errors are pickled

    def __str__(self) -> str:
        return self.text


class ModelError(LoweringError):
    """The file is not a legal ONNX model, or cannot be read."""


class NodeError(LoweringError):
    """A node cannot be lowered.

    `where` names the node as ONNX does (domain, operator, version, node name), `what` is the attribute, input or rule
    that is not supported, and `remedy` is the action for the user.
    """

    def __init__(self, code: str, where: str, what: str, remedy: str = "") -> None:
        self.where, self.what, self.remedy = where, what, remedy
        super().__init__(code, f"{where}: {what}" + (f" {remedy}" if remedy else ""))


class CompilerError(LoweringError):
    """The compiler failed by a bug of its own, not by a problem of the model."""


class TargetError(LoweringError):
    """The target is unknown, or this machine cannot build for it."""


class ArtifactError(LoweringError):
    """A saved module is damaged, too new, or compiled for another machine."""


class InputError(LoweringError):
    """An array passed to a compiled module has the wrong name, type, shape or memory."""
