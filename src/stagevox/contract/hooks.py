"""The hooks a model may define, as protocols (PC-4 to PC-9).

The runner finds hooks by attribute; a model need not inherit from these. In every signature ``H`` is the hidden
size, ``span`` the request's rows in this step, ``N`` a number of physical requests, ``Q`` the code groups of a frame.

Hooks return updates, they don't write state: the runner merges an update into the request's state after the hook
has succeeded (:func:`stagevox.contract.merge_update`). A hook may be called again with the same arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, Protocol, runtime_checkable

import torch

from .outputs import OmniOutput

SAMPLING = "sampling"
"""State of a request whose model sets ``mtp_request_info``: a mapping with the ``temperature`` and the ``seed`` of its tokens. A
request that draws has a seed, its own where the client gave none."""

Update = Mapping[str, Any]
"""New values for a request's state; nested mappings are merged field by field."""

MTP_INPUTS = "mtp_inputs"
"""Key of an update under which a decode row hands ``(last_hidden [1, H], text_step [1, H])`` to runner-managed MTP."""

RowResult = tuple[torch.Tensor, torch.Tensor, Update]
"""``(input_ids [span], input_embeds [span, H], update)``."""

BatchResult = tuple[torch.Tensor, torch.Tensor, Sequence[Update]]
"""``(input_ids [N], input_embeds [N, H], updates)``, one update a physical request."""

MTPBatchResult = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Sequence[Update]]
"""``(input_ids [N], input_embeds [N, H], last_hidden [N, H], text_step [N, H], updates)``."""


@runtime_checkable
class Preprocess(Protocol):
    """Turns one request's span into embeddings. Needs ``has_preprocess = True``."""

    def preprocess(self, input_ids: torch.Tensor, input_embeds: torch.Tensor, **info: Any) -> RowResult:
        """Condition one span.

        ``input_ids [span]`` are the span's token ids, ``input_embeds [span, H]`` what the model's ``embed_input_ids`` made of
        them; ``info`` is the request's state and, over it, the phase fields of :mod:`stagevox.contract.phase`. What conditions
        position ``p`` must be a pure function of the request and ``p``: the same position is asked for again after a preemption.
        """
        ...


@runtime_checkable
class PreprocessDecodeBatch(Protocol):
    """Conditions several single-position decode rows in one call. Needs ``has_preprocess = True``.

    Without ``talker_mtp`` a call gets rows that stand side by side in the step; with it, all decode rows of the step.
    """

    def preprocess_decode_batch(
        self, *, input_ids: torch.Tensor, req_infos: Sequence[Mapping[str, Any]]
    ) -> BatchResult | MTPBatchResult:
        """``input_ids [N]``; ``req_infos[i]`` is the state and phase of the request of row i, never in prefill.

        Return the five-tuple if the model has ``talker_mtp``, else the three-tuple. Return the same
        ``input_ids`` object if the ids don't change.
        """
        ...


@runtime_checkable
class PreprocessBatch(Protocol):
    """Prepares a whole step before the per-row hooks; the phase fields are not promised here (PC-9)."""

    def preprocess_batch(self, *, input_ids: torch.Tensor, req_infos: Sequence[Mapping[str, Any]]) -> None:
        """``input_ids [num_tokens]`` of the step; one info a request, in the order of the input batch."""
        ...


@runtime_checkable
class TalkerMTP(Protocol):
    """Completes a frame: the code groups after layer 0, and the embedding of the whole frame (PC-8, EX-8)."""

    def talker_mtp(
        self, input_ids: torch.Tensor, input_embeds: torch.Tensor, last_hidden: torch.Tensor, text_step: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Layer-0 codes ``input_ids [N]``, sampled from ``last_hidden [N, H]``, become ``(embeds [N, H], codes [N, Q])``.

        With ``mtp_request_info = True`` a keyword ``req_infos`` has each row's state and phase, for models that draw residual codes: the
        draw must be a function of the request's seed and the position alone.
        """
        ...


@runtime_checkable
class Postprocess(Protocol):
    """Keeps what the next step needs (EX-7). Needs ``has_postprocess = True``."""

    def postprocess(self, hidden: torch.Tensor, **info: Any) -> Update:
        """``hidden [n, H]``: a request's rows of this step that it has not seen yet; ``info`` places the first of them.

        Called for prompt chunks too, and never twice for one position: in a replay ``n`` is less than the span, or there is no call.
        """
        ...


@runtime_checkable
class MakeOmniOutput(Protocol):
    """Splits what ``forward`` returned into text hidden states and multimodal outputs."""

    def make_omni_output(self, model_outputs: Any, **kwargs: Any) -> OmniOutput:
        """``model_outputs`` is what ``forward`` returned.

        ``kwargs`` holds ``model_intermediate_buffer`` (a state a request, without phase fields) and ``request_token_spans``
        (``[start, end)`` a request on the token axis), both in the order of the input batch. If it raises, every request of the
        step fails: nobody can tell whose rows are right.
        """
        ...


@runtime_checkable
class OnRequestsFinished(Protocol):
    """Frees what a model keeps for requests outside their state (MS-10)."""

    def on_requests_finished(self, finished_req_ids: Set[str]) -> None:
        """Called once for each request that has ended, before the hooks of the next step, whatever kind of round that is.

        What it raises is logged: there is nobody left to fail.
        """
        ...


@runtime_checkable
class DeriveEngineTokens(Protocol):
    """Names the token that the sampler is bound to draw, where the requests' state decides it (MS-9, MS-11)."""

    def derive_engine_tokens(self, *, req_infos: Sequence[Mapping[str, Any]]) -> Sequence[int | None]:
        """``req_infos[i]`` is the state of row i with the phase fields of the position that was just computed, after ``make_omni_output``.

        Return the id that greedy sampling from the row's logits gives, for each row, or None where that isn't certain: then the whole
        step is sampled. Only asked in steps after the first of a window, and only where nothing else has a say in the choice: all
        rows greedy, no bias, ``min_tokens`` reached.
        """
        ...
