"""What enters and leaves a stage, as plain values. No torch and no vLLM here: tensors pass through as opaque objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class StageRequest:
    """A request as one stage sees it.

    A stage whose input comes from upstream is told of the request with ``prompt_token_ids=None``: it is registered and
    waits (``WAITING_FOR_INPUT``) until a :class:`StageInput` arrives.
    """

    req_id: str
    prompt_token_ids: list[int] | None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """vLLM ``SamplingParams`` fields the client set; the model's constraints are laid over them."""
    payload: Mapping[str, Any] = field(default_factory=dict)
    """Initial state of the request in ``model_intermediate_buffer``."""
    media: Mapping[str, Any] = field(default_factory=dict)
    """Images, sounds and videos behind the prompt's placeholders, as vLLM's ``multi_modal_data``; first stage only."""
    media_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the model's media processor, vLLM's ``mm_processor_kwargs``."""
    cache_salt: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Request options for the input adapter of a downstream stage, such as ``voice``."""


@dataclass(frozen=True, slots=True)
class StageInput:
    """What an input adapter makes of an upstream chunk.

    ``prompt_token_ids`` completes a waiting request, or extends the prompt of a generation request;
    ``payload`` is merged into the request's state. ``cache_salt`` is the digest of the conditioning. ``sampling`` is
    laid over the request's own. ``end`` says that nothing more will come.

    Conditioning may come in pieces while an AR request runs: ``ready`` says for how many positions it is on hand so far, prompt
    included (None: for all there will ever be). The request waits (``WAITING_FOR_CHUNK``) rather than run past them. Rows that
    come in pieces travel as :class:`stagevox.contract.RowsAt`.
    """

    prompt_token_ids: list[int] = field(default_factory=list)
    payload: Mapping[str, Any] = field(default_factory=dict)
    cache_salt: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    end: bool = True
    ready: int | None = None
    skip: bool = False
    """There is nothing to do here: the request ends at this stage as if it had made nothing."""


class StageOutput(NamedTuple):
    """What one step of a stage produced for one request, for the client's side."""

    req_id: str
    new_token_ids: list[int]
    multimodal: Mapping[str, Any]
    """Named tensors for this step only: frames of codes, samples."""
    finish_reason: str | None = None
    """``stop``, ``length``, ``abort`` or ``error`` on the last output, else None."""
    error: str | None = None
    positions: int = 0
    """Positions that a generation stage, which samples no tokens, computed."""


class StepRow(NamedTuple):
    """One row of the step log that ``Omni.trace()`` returns."""

    step: int
    req_id: str
    num_computed: int
    span: int
    prompt_len: int
    num_known: int
    is_prefill: bool
    used_mtp: bool
    is_resumed: bool
    window_step: int = 0
    """Which step of a merged round this was, from 1; 0 for a round of its own."""
