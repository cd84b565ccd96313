"""The error of requests that failed while other requests continue."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from ..errors import InputError


class RequestError(InputError):
    """A served decoder, or its setup, has failed on some requests, which the batcher has freed.

    `errors` has the error of each failed request by name. `answers` has the step's outputs for the others.
    """

    def __init__(self, errors: dict[Hashable, Exception], answers: dict[Hashable, np.ndarray]) -> None:
        self.errors, self.answers = errors, answers
        name, error = next(iter(errors.items()))
        subject = f"request {name!r} has" if len(errors) == 1 else f"request {name!r} and {len(errors) - 1} more have"
        super().__init__("batcher.request_failed", f"{subject} ended: {error}")
