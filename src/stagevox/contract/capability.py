"""What a model class declares about itself, read once at start-up."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class StageExecutionType(enum.Enum):
    """How a stage runs (EX-1)."""

    AR = "ar"
    """Scheduler, KV cache and sampler: one token after the other."""
    GENERATION = "generation"
    """Scheduled like a prompt, no logits: each position yields output once (Code2Wav)."""
    DIFFUSION = "diffusion"
    """A runtime of its own behind the same stage interface. Not there yet: choosing it is a start-up error."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The flags and hooks found on a model class."""

    has_preprocess: bool
    has_postprocess: bool
    has_decode_batch: bool
    """``preprocess_decode_batch`` is callable and ``has_preprocess`` is set."""
    has_preprocess_batch: bool
    has_talker_mtp: bool
    """``talker_mtp`` is callable: the runner completes frames between preprocess and forward."""
    mtp_request_info: bool
    """``talker_mtp`` wants to know whose rows it is given: it gets ``req_infos``."""
    has_make_omni_output: bool
    include_hidden: bool
    """``omni_pooler_payload_include_hidden``: hidden rows cross to the next stage (RT-4)."""
    supports_multi_step_decode: bool
    supports_multi_step_stages: tuple[str, ...]
    supports_native_mrv2_data_plane: bool
    supports_mrv2_full_graph_aux_outputs: bool

    @classmethod
    def of(cls, model: object) -> Capabilities:
        """Read the flags of a model class or instance; what is absent is off."""

        def flag(name: str) -> bool:
            return bool(getattr(model, name, False))

        def hook(name: str) -> bool:
            return callable(getattr(model, name, None))

        return cls(
            has_preprocess=flag("has_preprocess"),
            has_postprocess=flag("has_postprocess"),
            has_decode_batch=flag("has_preprocess") and hook("preprocess_decode_batch"),
            has_preprocess_batch=hook("preprocess_batch"),
            has_talker_mtp=hook("talker_mtp"),
            mtp_request_info=flag("mtp_request_info"),
            has_make_omni_output=hook("make_omni_output"),
            include_hidden=flag("omni_pooler_payload_include_hidden"),
            supports_multi_step_decode=flag("supports_multi_step_decode"),
            supports_multi_step_stages=tuple(getattr(model, "supports_multi_step_stages", ())),
            supports_native_mrv2_data_plane=flag("supports_native_mrv2_data_plane"),
            supports_mrv2_full_graph_aux_outputs=flag("supports_mrv2_full_graph_aux_outputs"),
        )
