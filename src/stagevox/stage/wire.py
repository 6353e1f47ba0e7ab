"""vLLM's step records with what a stage adds to them, and the settings that travel inside vLLM's config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from stagevox.contract import StageExecutionType

from .materialise import INLINE, PendingOutputs
from .outputs import Outputs, client_facing

CONFIG_KEY = "stagevox"
"""Where a stage's own settings stand in vLLM's ``additional_config``."""


@dataclass(frozen=True, slots=True)
class StageSettings:
    """What the scheduler and the runner of one stage need to know beyond vLLM's own config."""

    name: str
    execution_type: StageExecutionType
    async_scheduling: bool = False
    record: bool = False
    checkpoint: str = ""
    chunk_processor: str | None = None
    chunk_options: Mapping[str, Any] = field(default_factory=dict)
    input_adapter: str | None = None
    input_options: Mapping[str, Any] = field(default_factory=dict)
    extra_token: bool = False
    output_materialisation: str = INLINE
    """Where a step's outputs are made: one of :data:`stagevox.stage.materialise.MODES`."""
    has_talker_mtp: bool = False
    mtp_request_info: bool = False
    has_preprocess: bool = False
    """What a position computes depends on more than its token: requests share cached blocks only under a common salt."""
    multi_step_decode_steps: int = 0
    """How many decode steps one round may merge, after the settings were checked against model and engine; 0: off."""

    def to_config(self) -> dict[str, Any]:
        """As ``additional_config``: plain values, so that it crosses processes."""
        return {CONFIG_KEY: {**asdict(self), "execution_type": self.execution_type.value}}

    @classmethod
    def of(cls, config: VllmConfig) -> StageSettings | None:
        """The settings inside a vLLM config, or None if the engine isn't one of ours."""
        extra = config.additional_config
        raw = extra.get(CONFIG_KEY) if isinstance(extra, Mapping) else None
        if raw is None:
            return None
        return cls(**{**raw, "execution_type": StageExecutionType(raw["execution_type"])})


@dataclass
class OmniSchedulerOutput(SchedulerOutput):
    """A step with stage payloads on board, or one that merges several decode steps; made only for steps that need it."""

    omni_payloads: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    multi_step_plan: dict[str, int] = field(default_factory=dict)
    """Request to decode steps in this round; empty: an ordinary step."""

    @classmethod
    def wrap(cls, base: SchedulerOutput, payloads: dict[str, Mapping[str, Any]]) -> OmniSchedulerOutput:
        """``base`` plus payloads by request."""
        return cls(**vars(base), omni_payloads=payloads)

    @classmethod
    def planned(cls, base: SchedulerOutput, plan: dict[str, int]) -> OmniSchedulerOutput:
        """``base`` with as many tokens a request as ``plan`` has steps."""
        return cls(**vars(base)).with_tokens(plan, plan)

    def with_tokens(self, tokens: Mapping[str, int], plan: dict[str, int]) -> OmniSchedulerOutput:
        """A copy with other token counts for the requests in ``tokens``, a total to match, and another plan."""
        counts = {**self.num_scheduled_tokens, **tokens}
        values = {**vars(self), "num_scheduled_tokens": counts, "total_num_scheduled_tokens": sum(counts.values())}
        return OmniSchedulerOutput(**{**values, "multi_step_plan": plan})


class WindowReport(NamedTuple):
    """What the runner made of a plan."""

    steps: int
    """Steps that ran, the first one included."""
    derived: int = 0
    """Steps whose tokens were derived from the requests' state instead of sampled."""
    refusal: str | None = None
    """Why only the first one ran."""


@dataclass
class OmniModelRunnerOutput(ModelRunnerOutput):
    """A step's result with the two roads of outputs and the requests whose model failed."""

    inter_stage_outputs: Outputs = field(default_factory=dict)
    multimodal_outputs: Outputs = field(default_factory=dict)
    failed: dict[str, BaseException] = field(default_factory=dict)
    failed_after: dict[str, BaseException] = field(default_factory=dict)
    """Requests whose model failed in the middle of a window: after the tokens and outputs that are reported here."""
    window: WindowReport | None = None

    @classmethod
    def wrap(
        cls, base: ModelRunnerOutput, inter_stage: Outputs, multimodal: Outputs, failed: dict[str, BaseException]
    ) -> OmniModelRunnerOutput:
        """``base`` plus this step's additions."""
        return cls(**vars(base), inter_stage_outputs=inter_stage, multimodal_outputs=multimodal, failed=failed)

    @classmethod
    def of_window(
        cls, first: ModelRunnerOutput, tokens: list[list[int]], report: WindowReport, **parts: Any
    ) -> OmniModelRunnerOutput:
        """The result of a window, whose first step's was ``first``; ``parts`` are the other fields of this class."""
        base = {item.name: getattr(first, item.name) for item in fields(ModelRunnerOutput)}
        return cls(**{**base, "sampled_token_ids": tokens}, window=report, **parts)


class OmniAsyncOutput(AsyncModelRunnerOutput):
    """The same for a step whose sampled tokens, or whose outputs, are still on their way."""

    def __init__(
        self,
        inner: ModelRunnerOutput | AsyncModelRunnerOutput,
        pending: Sequence[PendingOutputs],
        failed: Mapping[str, BaseException],
    ) -> None:
        self._inner = inner
        self.inner = inner
        self.pending = pending
        self._failed = failed

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the tokens and the outputs, then wrap; requests whose outputs could not be made have failed, too."""
        base = self.inner.get_output() if isinstance(self.inner, AsyncModelRunnerOutput) else self.inner
        inter_stage: Outputs = {}
        failed = dict(self._failed)
        for part in self.pending:
            outputs, lost = part.join()
            inter_stage |= outputs
            failed = lost | failed
        return OmniModelRunnerOutput.wrap(base, inter_stage, client_facing(inter_stage), failed)
