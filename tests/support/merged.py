"""Drives the packaged Talker with and without merged steps: arrivals and aborts by round, the books checked after every step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from stagevox.contract import CODES
from stagevox.models.registry import resolve_topology
from stagevox.stage.engine import StageEngine
from stagevox.stage.multi_step.integrity import check_integrity
from stagevox.stage.payload import StageOutput, StageRequest
from support.talker_stage import PROMPT


def merged_talker(steps: int, **overrides: Any) -> StageEngine:
    """The Talker's engine with windows of ``steps``; no adapter and no chunks."""
    spec = {stage.name: stage for stage in resolve_topology("mini").stages}["talker"]
    extras = {"multi_step_decode_steps": steps}
    spec = dataclasses.replace(spec, input_adapter=None, chunk_processor=None, engine_extras=extras)
    # Without windows prefix caching is off too: both sides preempt and replay alike.
    return StageEngine(spec, {"enable_prefix_caching": False, **overrides} if not steps else overrides, record=True)


@dataclass
class Told:
    """What one request came to."""

    outputs: list[StageOutput] = field(default_factory=list)
    finish: str | None = None

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.new_token_ids]

    @property
    def codes(self) -> torch.Tensor:
        frames = [output.multimodal[CODES] for output in self.outputs if CODES in output.multimodal]
        return torch.cat([torch.empty(0, 4, dtype=torch.long), *frames])


def runner_of(engine: StageEngine) -> Any:
    return engine._core.model_executor.driver_worker.worker.model_runner


def check_books(engine: StageEngine) -> None:
    """The scheduler's books, and the runner's against them."""
    scheduler, runner = engine._scheduler, runner_of(engine)
    flight = len(engine._core.batch_queue or ())
    check_integrity(scheduler, flight)
    batch = runner.input_batch
    for row, req_id in enumerate(batch.req_ids):
        state, request = runner.requests[req_id], scheduler.requests.get(req_id)
        assert batch.num_tokens_no_spec[row] == state.num_tokens
        if request is None or request.num_in_flight_tokens or request.num_computed_tokens < request.num_prompt_tokens:
            continue
        known = len(state.output_token_ids)
        assert known == request.num_output_tokens
        if not scheduler.windows.asynchronous:
            assert list(state.output_token_ids) == list(request.output_token_ids)
            ids = batch.token_ids_cpu[row, request.num_prompt_tokens : request.num_tokens].tolist()
            assert ids == list(request.output_token_ids)
        log = runner.model_intermediate_buffer.logs.get(req_id)
        assert log is None or log.end <= request.num_computed_tokens


def play(
    engine: StageEngine,
    texts: Mapping[str, list[int]],
    sampling: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    arrive: Mapping[str, int] | None = None,
    abort: Mapping[str, int] | None = None,
) -> dict[str, Told]:
    """Run ``texts`` (piece ids) to their end. ``arrive`` says before how many frames of the first request in all a request comes,
    ``abort`` after how many frames of its own one goes; both happen at the end of the round in which that is reached."""
    told = {name: Told() for name in texts}
    arrive, abort = dict(arrive or {}), dict(abort or {})
    first = next(iter(texts))

    def add(name: str) -> None:
        engine.add(
            StageRequest(
                name,
                list(PROMPT),
                sampling={"temperature": 0.0, "max_tokens": 171, **(sampling or {}).get(name, {})},
                payload={"text_rows": torch.tensor(texts[name]), "voice": "slt"},
                cache_salt=f"{texts[name]}",
            )
        )

    for name in texts:
        if name not in arrive:
            add(name)
    while engine.has_work() or arrive:
        if engine.has_work():
            for output in engine.step()[0]:
                one = told[output.req_id]
                assert one.finish is None, "a request ends once"
                one.outputs.append(output)
                one.finish = output.finish_reason
            check_books(engine)
        for name, frames in list(arrive.items()):
            if told[first].finish or len(told[first].codes) >= frames:
                del arrive[name]
                add(name)
        for name, frames in list(abort.items()):
            if len(told[name].codes) >= frames:
                del abort[name]
                engine.abort([name])
                if told[name].finish is None:
                    told[name].finish = "abort"
    assert engine.num_requests == 0
    assert not any(engine.state_size().values())
    assert engine._scheduler.kv_cache_manager.usage == 0
    assert not runner_of(engine).requests
    return told
