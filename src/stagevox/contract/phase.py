"""Where a request stands in a step: the phase fields that every per-row hook is given (PC-1, PC-2)."""

from __future__ import annotations

from typing import Any, NamedTuple

IS_PREFILL = "_omni_is_prefill"
NUM_COMPUTED_TOKENS = "_omni_num_computed_tokens"
PROMPT_LEN = "_omni_prompt_len"

PHASE_FIELDS = (IS_PREFILL, NUM_COMPUTED_TOKENS, PROMPT_LEN)
"""Keyword names of the stable, read-only fields. Values in a model's own state never replace them."""


class RowPhase(NamedTuple):
    """Where one request stands in one step.

    ``num_computed`` positions were computed before this step; the span covers
    ``[num_computed, num_computed + span)``. ``num_known`` counts the positions whose token is already decided;
    models never see it. The flattened token axis holds the span at ``[start, start + span)``.
    """

    req_id: str
    start: int
    span: int
    num_computed: int
    prompt_len: int
    num_known: int

    @property
    def is_prefill(self) -> bool:
        """True while the first position of the span belongs to the prompt."""
        return self.num_computed < self.prompt_len

    @property
    def end(self) -> int:
        """One past the last row on the flattened token axis."""
        return self.start + self.span

    @property
    def is_sampled(self) -> bool:
        """True if the span reaches the newest known position, so that a new token is drawn from its last row."""
        return self.num_computed + self.span >= self.num_known

    def advanced(self) -> RowPhase:
        """The same request's next decode row: one position on, its token decided."""
        req_id, start, _, computed, prompt_len, known = self
        return RowPhase(req_id, start, 1, computed + 1, prompt_len, known + 1)

    def fields(self) -> dict[str, Any]:
        """The three fields under their keyword names."""
        return {
            IS_PREFILL: self.num_computed < self.prompt_len,
            NUM_COMPUTED_TOKENS: self.num_computed,
            PROMPT_LEN: self.prompt_len,
        }
