"""One stage: a vLLM engine core in this process, built from a stage's spec and an operator's overrides."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Mapping, Sequence, Set
from typing import Any

from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.request import Request

from stagevox.config.topology import StageSpec
from stagevox.connectors.base import Chunk
from stagevox.errors import CapabilityError, ConfigError, StagevoxError

from .media import MediaReader
from .messages import Gauges
from .payload import StageInput, StageOutput, StageRequest, StepRow
from .sampling import sampling_params
from .vllm_config import first_reason, make_config

# Engines of this process. vLLM's shutdown destroys the process groups that all of them share: only the last one may call it.
_open: set[StageEngine] = set()


class StageEngine:
    """A stage as the drivers see it (:class:`stagevox.pipeline.stage.Stage`)."""

    def __init__(
        self,
        spec: StageSpec,
        overrides: Mapping[str, Any] | None = None,
        *,
        record: bool = False,
    ) -> None:
        """Load the stage. ``overrides`` are vLLM engine arguments; ``record`` keeps a step log."""
        self.name = spec.name
        self._spec = spec
        config = make_config(spec, overrides or {}, record=record)
        self._media = MediaReader(spec.name, config)
        try:
            self._core = EngineCore(config, Executor.get_class(config), log_stats=False)
        except ValueError as error:  # such as a KV pool too small for one request
            raise CapabilityError(spec.name, first_reason(error)) from error
        except StagevoxError:
            raise
        except Exception as error:  # whatever vLLM trips over: weights it can't read, settings it only asserts
            reason = f"{type(error).__name__}: {first_reason(error)}"
            raise ConfigError(spec.name, f"the engine can't start: {reason}") from error
        _open.add(self)
        self._scheduler: Any = self._core.scheduler
        self._scheduler.make_request = self._make_request
        self._unshared = itertools.count()
        self._max_model_len = config.model_config.max_model_len

    def add(self, request: StageRequest) -> None:
        """Register a request; it runs at once if it has a prompt, else it waits for its input."""
        self._scheduler.omni_add(request)

    def deliver(self, chunk: Chunk) -> None:
        """Hand over an upstream chunk."""
        self._scheduler.omni_deliver(chunk)

    def abort(self, req_ids: Sequence[str]) -> None:
        """Free the requests here; unknown ids are ignored."""
        self._core.abort_requests(list(req_ids))

    def has_work(self) -> bool:
        """True if a step would do something."""
        return bool(self._core.batch_queue) or self._scheduler.has_requests()

    def step(self) -> tuple[list[StageOutput], list[Chunk]]:
        """Run one scheduling round."""
        _, executed = self._core.step_fn()
        self._core.post_step(executed)
        outputs, chunks = self._scheduler.take_outputs()
        return outputs, chunks

    def hold(self, req_ids: Set[str]) -> None:
        """Don't schedule these requests, and no others but them: their consumer is behind. Unknown ids are ignored."""
        self._scheduler.omni_held = req_ids

    def gauges(self) -> Gauges:
        """How the stage stands now."""
        scheduler = self._scheduler
        merged = self.multi_step()
        return Gauges(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            parked=len(scheduler.wait_room),
            kv_usage=float(scheduler.kv_cache_manager.usage),
            preemptions=scheduler.omni_preemptions,
            replays=scheduler.omni_replays,
            windows=merged.get("executed_windows", 0),
            window_steps=merged.get("executed_steps", 0),
            tokens_saved=merged.get("tokens_saved", 0),
            refusals=merged.get("refusals", {}),
        )

    def trace(self) -> list[StepRow]:
        """The step log so far; empty unless made with ``record``."""
        log: list[StepRow] = self._core.collective_rpc("omni_step_log")[0]
        return log

    def clear_trace(self) -> None:
        """Forget the step log so far, and count steps from 0 again."""
        self._core.collective_rpc("omni_clear_step_log")

    @property
    def num_requests(self) -> int:
        """Requests held here, waiting ones included."""
        return len(self._scheduler.omni_requests)

    def state_size(self) -> dict[str, int]:
        """What the runner holds per request, by kind; all zero once idle."""
        size: dict[str, int] = self._core.collective_rpc("omni_state_size")[0]
        return size

    @property
    def scheduler(self) -> Any:
        """The engine's scheduler; for benches."""
        return self._scheduler

    @property
    def executor(self) -> Any:
        """The engine's executor; for benches."""
        return self._core.model_executor

    def multi_step(self) -> dict[str, Any]:
        """What merged decode did so far, with the effective number of steps under ``steps``; 0 where it is off."""
        ledger = getattr(self._scheduler, "windows", None)
        return {"steps": 0} if ledger is None else {"steps": ledger.steps, **ledger.counters.as_dict()}

    def close(self) -> None:
        """Stop the engine; closing it again does nothing."""
        if self not in _open:
            return
        _open.discard(self)
        if (ledger := getattr(self._scheduler, "windows", None)) is not None:
            ledger.counters.log(now=True)
        if _open:
            self._core.model_executor.shutdown()
            self._core.scheduler.shutdown()
        else:
            self._core.shutdown()

    def _own_salt(self) -> str | None:
        """A salt that no other request has, if ids alone don't say what a block holds and nobody gave a digest."""
        return f"unshared-{next(self._unshared)}" if self._scheduler.stage.has_preprocess else None

    def _make_request(self, request: StageRequest, given: StageInput) -> Request:
        fields = {**self._spec.sampling, **request.sampling, **given.sampling}
        prompt, features = list(given.prompt_token_ids), None
        if request.media:
            prompt, features = self._media.read(prompt, request.media, request.media_options)
        extra = int(self._spec.extra_token)
        params = sampling_params(fields, self._spec.constraints, max(1, self._max_model_len - len(prompt) - extra))
        params.max_tokens += extra
        salt = given.cache_salt or request.cache_salt or self._own_salt()
        if self._scheduler.stage.mtp_request_info and params.temperature > 0:
            # A block's keys follow from all codes of its frames, and its hash knows those of layer 0 alone.
            params.seed = secrets.randbits(63) if params.seed is None else params.seed
            salt = f"{salt}/{params.seed}"
        made, _ = self._core.preprocess_add_request(
            EngineCoreRequest(
                request_id=request.req_id,
                prompt_token_ids=prompt,
                mm_features=features,
                sampling_params=params,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=salt,
                data_parallel_rank=None,
            )
        )
        return made
