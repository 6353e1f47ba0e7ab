"""Every error stagevox raises on purpose.

::

    StagevoxError
    ├── BadRequestError            the caller's input; .field names it, .allowed says what would do
    │   ├── EmptyTextError
    │   ├── VocabularyError        a text the voice has no words for
    │   ├── TextTooLongError
    │   ├── UnknownVoiceError
    │   ├── BadMediaError          an image, a sound or a video that can't be read
    │   └── BadParameterError      temperature, seed, max_tokens, ...
    ├── ConfigError                the operator's input, found before an engine starts; .field, .allowed
    │   ├── UnknownModelError
    │   ├── UnknownStageError
    │   ├── UnknownOverrideError
    │   ├── CheckpointError        a weights folder that is not what its config says
    │   ├── CapabilityError        settings that exclude each other, or that a model did not declare
    │   └── VersionError           a neighbouring vLLM
    ├── ContractError              a model broke the phase contract; .hook names the method
    │   ├── HookCountError         rows or updates that don't match the span or the batch
    │   ├── HookShapeError
    │   ├── HookRaisedError        the hook itself raised
    │   └── MissingStateError      state the model needs and nobody stored
    ├── SamplesError               samples that are no waveform
    ├── ClosedError                used after close()
    └── RequestFailedError         a request ended without a result
        ├── DeadlineError          an upstream input or chunk never came
        ├── ChunkOrderError        a chunk was lost, repeated or came after the end
        ├── PayloadError           a chunk holds what no road between processes can carry
        ├── BackpressureError      a stage went on producing for a consumer that doesn't take
        └── StageDiedError         the stage's engine is gone
"""

from __future__ import annotations

from collections.abc import Sequence


class StagevoxError(Exception):
    """Base of all errors on this page."""


class _FieldError(StagevoxError):
    """An error about one named input.

    ``field`` is the name the caller knows it by (``text``, ``talker.max_num_seqs``); ``allowed`` lists what
    would have been accepted, if that can be listed.
    """

    def __init__(self, field: str, message: str, allowed: Sequence[str] = ()) -> None:
        self.field = field
        self.allowed = tuple(allowed)
        hint = f" (allowed: {', '.join(self.allowed)})" if self.allowed else ""
        super().__init__(f"{field}: {message}{hint}")


class BadRequestError(_FieldError):
    """The caller's input can't be served."""


class EmptyTextError(BadRequestError):
    """The text is empty or blank."""


class VocabularyError(BadRequestError):
    """The text holds words the voice doesn't know."""


class TextTooLongError(BadRequestError):
    """The text needs more positions than a stage's context holds."""


class UnknownVoiceError(BadRequestError):
    """No such voice."""


class BadMediaError(BadRequestError):
    """An image, a sound or a video is empty, damaged or of no known kind."""


class BadParameterError(BadRequestError):
    """A sampling or output parameter is out of range."""


class ConfigError(_FieldError):
    """The operator's settings can't work."""


class UnknownModelError(ConfigError):
    """Neither a packaged model nor a checkpoint folder."""


class UnknownStageError(ConfigError):
    """No stage of that name in this model."""


class UnknownOverrideError(ConfigError):
    """Not an engine argument of a stage."""


class CheckpointError(ConfigError):
    """A checkpoint folder that doesn't hold what its config says."""


class CapabilityError(ConfigError):
    """Settings that exclude each other or that the model has not declared."""


class VersionError(ConfigError):
    """An installed dependency is not the version this package extends."""


class ContractError(StagevoxError):
    """A model broke the runner-to-model contract; ``hook`` names the method."""

    def __init__(self, hook: str, message: str) -> None:
        self.hook = hook
        super().__init__(f"{hook}: {message}")


class HookCountError(ContractError):
    """A hook returned another number of rows or updates than it was given."""

    def __init__(self, hook: str, what: str, expected: int, got: int) -> None:
        self.expected, self.got = expected, got
        super().__init__(hook, f"expected {expected} {what}, got {got}")


class HookShapeError(ContractError):
    """A hook returned a tensor of the wrong shape, or not a tensor."""


class HookRaisedError(ContractError):
    """A hook raised; the original exception is the cause."""


class MissingStateError(ContractError):
    """Per-request state that a hook needs was never stored."""


class SamplesError(StagevoxError):
    """Samples are no waveform: not one-dimensional, or not finite."""


class ClosedError(StagevoxError):
    """Something was used after it had been closed."""


class RequestFailedError(StagevoxError):
    """A request ended without a result."""


class DeadlineError(RequestFailedError):
    """An upstream input or chunk did not come in time."""


class ChunkOrderError(RequestFailedError):
    """A chunk came out of order: one was lost or repeated, or it came after the end."""


class PayloadError(RequestFailedError):
    """A chunk holds something that can't be carried to another process."""


class BackpressureError(RequestFailedError):
    """More chunks of a request wait for a consumer than its producer may keep."""


class StageDiedError(RequestFailedError):
    """The engine of a stage is gone."""
