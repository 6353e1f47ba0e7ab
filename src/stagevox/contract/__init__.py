"""What a model author imports: the phase contract between runner and model. Needs torch, nothing else."""

from .capability import Capabilities, StageExecutionType
from .checks import check_batch, check_mtp, check_mtp_inputs, check_output, check_row, check_update
from .hooks import (
    MTP_INPUTS,
    BatchResult,
    MakeOmniOutput,
    MTPBatchResult,
    Postprocess,
    Preprocess,
    PreprocessBatch,
    PreprocessDecodeBatch,
    RowResult,
    TalkerMTP,
    Update,
)
from .outputs import CODES, SAMPLE_RATE, WAVEFORM, OmniOutput, OwnedBatchTensor, merge_update
from .phase import IS_PREFILL, NUM_COMPUTED_TOKENS, PHASE_FIELDS, PROMPT_LEN, RowPhase

__all__ = [
    "CODES",
    "IS_PREFILL",
    "MTP_INPUTS",
    "NUM_COMPUTED_TOKENS",
    "PHASE_FIELDS",
    "PROMPT_LEN",
    "SAMPLE_RATE",
    "WAVEFORM",
    "BatchResult",
    "Capabilities",
    "MTPBatchResult",
    "MakeOmniOutput",
    "OmniOutput",
    "OwnedBatchTensor",
    "Postprocess",
    "Preprocess",
    "PreprocessBatch",
    "PreprocessDecodeBatch",
    "RowPhase",
    "RowResult",
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
