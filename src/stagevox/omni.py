"""The offline front door: texts in, speech out, all stages in this process."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stagevox.audio.check import Samples
from stagevox.audio.stream import SampleStream
from stagevox.config.env import prepare_inline_process
from stagevox.config.multi_step import FIELD
from stagevox.connectors.local import LocalConnector
from stagevox.errors import (
    BadParameterError,
    BadRequestError,
    ClosedError,
    ConfigError,
    RequestFailedError,
    SamplesError,
    StagevoxError,
)
from stagevox.pipeline.events import ClientEvent, EmitOutput, FinishRequest
from stagevox.pipeline.inline import InlineDriver
from stagevox.pipeline.orchestrator import Orchestrator
from stagevox.pipeline.request import StageStats
from stagevox.pipeline.spans import Watcher
from stagevox.stage.payload import StageOutput, StepRow

if TYPE_CHECKING:  # these import torch, which reads the environment that is set below first
    from stagevox.config.blueprint import Blueprint
    from stagevox.config.topology import StageSpec
    from stagevox.pipeline.stage import Stage

Prompt = str | Mapping[str, Any]
"""A text, or a mapping with the fields that the model's front end knows, such as ``text`` and ``voice``."""

OnEvent = Callable[[ClientEvent], None]

CONFIGURED: Any = object()
"""Stands for the deadline of the deploy file. None doesn't: it reads like no deadline at all."""


@dataclass(frozen=True, slots=True, eq=False)
class OmniResult:
    """What became of one prompt."""

    text: str
    """What was to be spoken: the first stage's reply."""
    audio: Samples
    """float32 ``[samples]`` in [-1, 1]; empty if nothing was spoken."""
    sample_rate: int
    codes: NDArray[np.int64]
    """``[frames, Q]``; ``[0, 0]`` if there are none."""
    finish_reason: str
    """``stop``: all was spoken; ``length``: a cap cut it; ``abort``; ``error``: see ``error``, the rest is what came before."""
    error: StagevoxError | None = None
    seconds: float = 0.0
    """From submission to the last sample."""
    first_audio_seconds: float | None = None
    """From submission to the first sample; None without any."""
    stages: tuple[StageStats, ...] = field(default=(), repr=False)
    """What the call that made this result took, stage by stage, for all of its prompts together."""


class Omni:
    """A model, loaded: its stages' engines live in this process until :meth:`close`.

    ``model`` is a packaged model's name, a checkpoint folder, or a :class:`~stagevox.config.blueprint.Blueprint`.
    ``stage_overrides`` maps a stage to vLLM engine arguments. ``record_trace`` keeps the step log for :meth:`trace`, its newest rows.
    ``deadline`` is how many seconds a stage may wait for its input before the request fails; by default the deploy file's, or
    30. ``deploy_config`` is an operator's YAML file (docs/configuration.md). ``multi_step_decode_steps`` is how many decode steps one
    round may merge, 0 or 2 to 16, in every stage whose model can; None leaves it to the environment and to the stages' own
    settings. Not thread-safe.

    Raises:
        ConfigError: settings that can't work, found before any engine starts where that is possible.
    """

    def __init__(
        self,
        model: str | Blueprint = "mini",
        stage_overrides: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        record_trace: bool = True,
        deadline: float = CONFIGURED,
        deploy_config: str | os.PathLike[str] | None = None,
        multi_step_decode_steps: int | None = None,
    ) -> None:
        self._stages: list[Stage] = []
        weakref.finalize(self, _close_all, self._stages)  # at the latest when the interpreter exits, while modules are whole
        self._driver: InlineDriver | None = None
        self._count = 0
        self._busy = False
        prepare_inline_process()
        from stagevox.config.blueprint import Blueprint

        given = {"deploy_config": deploy_config, "stage_overrides": stage_overrides, FIELD: multi_step_decode_steps}
        if isinstance(model, Blueprint):
            for name, value in given.items():
                if value is not None:
                    raise ConfigError(name, "belong into the blueprint")
            self._blueprint = model
        else:
            self._blueprint = Blueprint.of(
                model, stage_overrides, deploy_config=deploy_config, multi_step=multi_step_decode_steps
            )
        self._blueprint.effective.check_one_process()
        self._blueprint.check_overrides()
        if deadline is CONFIGURED:
            deadline = self._blueprint.effective.deadline
        if isinstance(deadline, bool) or not isinstance(deadline, int | float) or not deadline > 0:
            raise ConfigError("deadline", f"not a number of seconds above 0: {deadline!r}")
        orchestrator = Orchestrator(self._blueprint.stages, deadline, self._blueprint.topology.text_stage)
        check_stages(self._blueprint)
        try:
            for spec in self._blueprint.topology.stages:
                self._stages.append(start_stage(spec, self._blueprint.overrides.get(spec.name, {}), record_trace))
        except BaseException:
            self.close()
            raise
        self._driver = InlineDriver(self._stages, orchestrator, LocalConnector())
        self._warm_up(self._blueprint.topology.warm_up)

    @property
    def sample_rate(self) -> int:
        """Samples a second of all audio, in Hz."""
        return self._blueprint.front_end.sample_rate

    @property
    def voices(self) -> tuple[str, ...]:
        """The names a prompt's ``voice`` may have."""
        return self._blueprint.front_end.voices

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None = None,
        *,
        on_event: OnEvent | None = None,
        on_step: Watcher | None = None,
    ) -> list[OmniResult]:
        """Speak all prompts, concurrently; results come in the order of the prompts.

        ``sampling_params`` are for all prompts, or a sequence of one for each: vLLM's fields, for the Talker, or for a
        stage if under its name (``{"seed": 1, "thinker": {"max_tokens": 20}}``). A prompt that can't be served, or fails,
        fails alone: its result has ``error``. ``on_event`` sees every stage's outputs as they come, ``on_step`` every step with its
        times.

        Raises:
            BadRequestError: parameters given for all prompts are wrong, or not one for each prompt; or a call from inside another
                one, such as from ``on_event``.
            ClosedError: after :meth:`close`.
        """
        driver = self._open()
        texts = _as_list(prompts)
        params = self._params(sampling_params, len(texts))
        before = driver.stats()
        with self._alone(), _interrupts_between_rounds() as check, driver.cleared_on_error():
            driver.on_step = on_step
            answers = [self._submit(driver, prompt, param) for prompt, param in zip(texts, params, strict=True)]
            by_id = {answer.req_id: answer for answer in answers}
            for event in driver.events(each_round=check):
                match event:
                    case EmitOutput(stage, output):
                        by_id[output.req_id].take(stage, output, driver)
                    case FinishRequest(req_id):
                        by_id[req_id].finish(event)
                if on_event is not None:
                    on_event(event)
                    self._open()
        stats = tuple(after.since(was) for after, was in zip(driver.stats(), before, strict=True))
        return [answer.result(stats) for answer in answers]

    def trace(self) -> dict[str, list[StepRow]]:
        """The step log of each stage since it was loaded; empty lists without ``record_trace``."""
        self._open()
        return {stage.name: stage.trace() for stage in self._stages}

    def multi_step(self) -> dict[str, dict[str, Any]]:
        """What merged decode did in each stage: the effective number of steps, windows, steps, tokens saved, refusals by reason."""
        self._open()
        return {stage.name: stage.multi_step() for stage in self._stages}

    def assert_idle(self) -> None:
        """Check that no request has left anything behind."""
        self._open().assert_idle()

    def close(self) -> None:
        """Stop the engines; closing again does nothing."""
        self._driver = None
        _close_all(self._stages)

    def __enter__(self) -> Omni:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _warm_up(self, text: str | None) -> None:
        """Speak a text nobody hears: the first use of every kernel takes longest. What fails here fails again, and says so then."""
        if text is None:
            return
        self.generate(text)
        for stage in self._stages:
            stage.clear_trace()

    def _open(self) -> InlineDriver:
        if self._driver is None:
            raise ClosedError("this Omni is closed")
        return self._driver

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse a second call while one runs: it would take the events of the first."""
        if self._busy:
            raise BadRequestError("generate", "this Omni is in the middle of another call")
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _params(self, given: Any, count: int) -> list[Mapping[str, Any] | None]:
        from stagevox.config.sampling import check_sampling

        if given is None or isinstance(given, Mapping):
            check_sampling(given, self._blueprint.stages)
            return [given] * count
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise BadParameterError("sampling_params", f"not a mapping but a {type(given).__name__}")
        if len(given) != count:
            raise BadParameterError("sampling_params", f"{len(given)} for {count} prompts")
        return list(given)

    def _submit(self, driver: InlineDriver, prompt: Prompt, params: Mapping[str, Any] | None) -> _Answer:
        self._count += 1
        answer = _Answer(f"omni-{self._count}", prompt, self._blueprint)
        try:
            driver.submit(self._blueprint.admit(answer.req_id, prompt, params))
        except StagevoxError as error:
            answer.reason, answer.error = "error", error
        return answer


class _Answer:
    """Collects the outputs of one prompt."""

    def __init__(self, req_id: str, prompt: Prompt, blueprint: Blueprint) -> None:
        from stagevox.contract import CODES, WAVEFORM

        self.req_id = req_id
        self._prompt = prompt if isinstance(prompt, Mapping) else {"text": prompt}
        self.reason: str | None = None
        self.error: StagevoxError | None = None
        self._keys = CODES, WAVEFORM
        self._front_end = blueprint.front_end
        self._first, self._last = blueprint.stages[0], blueprint.stages[-1]
        self._token_ids: list[int] = []
        self._codes: list[NDArray[np.int64]] = []
        self._samples = SampleStream(blueprint.front_end.sample_rate)
        self._fault: RequestFailedError | None = None
        self._seconds = 0.0
        self._first_audio: float | None = None

    def take(self, stage: str, output: StageOutput, driver: InlineDriver) -> None:
        codes, waveform = self._keys
        if stage == self._first:
            self._token_ids += output.new_token_ids
        if codes in output.multimodal:
            self._codes.append(np.asarray(output.multimodal[codes]).astype(np.int64))
        if stage == self._last and waveform in output.multimodal:
            try:
                self._samples.push(output.multimodal[waveform])
            except SamplesError as error:
                self._fault = RequestFailedError(f"{stage}: {error}")
                driver.fail(self.req_id, self._fault)  # which knows it no longer if these were its last samples

    def finish(self, event: FinishRequest) -> None:
        timing = event.timing
        self.reason, self.error = event.finish_reason, event.error
        if self._fault is not None:
            self.reason, self.error = "error", self._fault
        self._seconds = timing.finished_at - timing.arrived_at
        if timing.first_output_at is not None and self._samples.num_samples:
            self._first_audio = timing.first_output_at - timing.arrived_at

    def result(self, stats: tuple[StageStats, ...]) -> OmniResult:
        assert self.reason is not None
        return OmniResult(
            text=self._front_end.reply_text(self._token_ids, self._prompt) if self._token_ids else "",
            audio=self._samples.joined(),
            sample_rate=self._samples.sample_rate,
            codes=np.concatenate(self._codes) if self._codes else np.zeros((0, 0), dtype=np.int64),
            finish_reason=self.reason,
            error=self.error,
            seconds=self._seconds,
            first_audio_seconds=self._first_audio,
            stages=stats,
        )


def _as_list(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise BadParameterError("prompts", f"not texts but a {type(prompts).__name__}")
    return list(prompts)


def _close_all(stages: list[Stage]) -> None:
    while stages:
        with suppress(Exception):  # one engine that fails to stop must not keep the others
            stages.pop().close()


def check_stages(blueprint: Blueprint) -> None:
    """Make vLLM's config of the stages that the operator has touched, for what only vLLM knows of how values fit together."""
    from stagevox.stage.version import check_vllm_version

    check_vllm_version()
    for spec in blueprint.topology.stages:
        overrides = blueprint.overrides.get(spec.name)
        if overrides:
            from stagevox.stage.vllm_config import make_merging_config

            make_merging_config(spec, overrides)


def start_stage(spec: StageSpec, overrides: Mapping[str, Any], record: bool) -> Stage:
    """Load one stage's engine in this process; the first call imports vLLM."""
    from stagevox.stage.version import check_vllm_version

    check_vllm_version()
    from stagevox.stage.engine import StageEngine

    return StageEngine(spec, overrides, record=record)


@contextmanager
def _interrupts_between_rounds() -> Iterator[Callable[[], None]]:
    """Let a first Ctrl-C wait until the engines stand between two steps, so that they stay whole; a second one doesn't wait.

    Yields what each round calls. Leaves signals alone outside the main thread and where somebody else handles them.
    """
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield lambda: None
        return
    pressed = False

    def press(signum: int, frame: Any) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, press)
    try:
        yield check
        check()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
