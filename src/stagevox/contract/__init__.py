"""What a model author imports: the phase contract between runner and model. Needs torch, nothing else.

Names that need torch are imported when they are first used: a server process knows stages and the names of their outputs, and
never loads torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .capability import Capabilities, StageExecutionType
from .keys import CODES, HIDDEN, MROPE_POSITIONS, SAMPLE_RATE, WAVEFORM
from .phase import IS_PREFILL, NUM_COMPUTED_TOKENS, PHASE_FIELDS, PROMPT_LEN, RowPhase

if TYPE_CHECKING:
    from .checks import check_batch, check_mtp, check_mtp_inputs, check_output, check_row, check_update
    from .hooks import (
        MTP_INPUTS,
        SAMPLING,
        BatchResult,
        DeriveEngineTokens,
        MakeOmniOutput,
        MTPBatchResult,
        OnRequestsFinished,
        Postprocess,
        Preprocess,
        PreprocessBatch,
        PreprocessDecodeBatch,
        RowResult,
        TalkerMTP,
        Update,
    )
    from .outputs import OmniOutput, OwnedBatchTensor, RowsAt, merge_update

__all__ = [
    "CODES",
    "HIDDEN",
    "IS_PREFILL",
    "MROPE_POSITIONS",
    "MTP_INPUTS",
    "NUM_COMPUTED_TOKENS",
    "PHASE_FIELDS",
    "PROMPT_LEN",
    "SAMPLE_RATE",
    "SAMPLING",
    "WAVEFORM",
    "BatchResult",
    "Capabilities",
    "DeriveEngineTokens",
    "MTPBatchResult",
    "MakeOmniOutput",
    "OmniOutput",
    "OnRequestsFinished",
    "OwnedBatchTensor",
    "Postprocess",
    "Preprocess",
    "PreprocessBatch",
    "PreprocessDecodeBatch",
    "RowPhase",
    "RowResult",
    "RowsAt",
    "StageExecutionType",
    "TalkerMTP",
    "Update",
    "check_batch",
    "check_mtp",
    "check_mtp_inputs",
    "check_output",
    "check_row",
    "check_update",
    "merge_update",
]

_HOMES = {
    "BatchResult": ".hooks",
    "DeriveEngineTokens": ".hooks",
    "MTPBatchResult": ".hooks",
    "MTP_INPUTS": ".hooks",
    "MakeOmniOutput": ".hooks",
    "OmniOutput": ".outputs",
    "OnRequestsFinished": ".hooks",
    "OwnedBatchTensor": ".outputs",
    "Postprocess": ".hooks",
    "Preprocess": ".hooks",
    "PreprocessBatch": ".hooks",
    "PreprocessDecodeBatch": ".hooks",
    "RowResult": ".hooks",
    "SAMPLING": ".hooks",
    "RowsAt": ".outputs",
    "TalkerMTP": ".hooks",
    "Update": ".hooks",
    "check_batch": ".checks",
    "check_mtp": ".checks",
    "check_mtp_inputs": ".checks",
    "check_output": ".checks",
    "check_row": ".checks",
    "check_update": ".checks",
    "merge_update": ".outputs",
}


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first used."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
