"""The packaged Talker as a stage of its own, driven request by request."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stagevox.contract import CODES
from stagevox.models.registry import resolve_topology
from stagevox.stage.engine import StageEngine
from stagevox.stage.payload import StageRequest, StepRow

PROMPT_LEN = 6
PROMPT = [514] * (PROMPT_LEN - 1) + [513]


@dataclass
class Spoken:
    """What one request came to."""

    codes: torch.Tensor
    finish_reason: str
    error: str | None


def talker_engine(**overrides: Any) -> StageEngine:
    """The Talker's engine, recording its step log; no adapter, since tests hand it its state."""
    spec = {stage.name: stage for stage in resolve_topology("mini").stages}["talker"]
    spec = dataclasses.replace(spec, input_adapter=None, chunk_processor=None)
    return StageEngine(spec, overrides, record=True)


def speak(
    engine: StageEngine, texts: Mapping[str, list[int]], sampling: Mapping[str, Mapping[str, Any]] | None = None
) -> dict[str, Spoken]:
    """Run all texts (``req_id`` to piece ids, EOS included) at once to their end."""
    for req_id, ids in texts.items():
        engine.add(
            StageRequest(
                req_id,
                list(PROMPT),
                sampling={"temperature": 0.0, "max_tokens": 171, **(sampling or {}).get(req_id, {})},
                payload={"text_rows": torch.tensor(ids), "voice": "slt"},
                cache_salt=f"{ids}",
            )
        )
    frames: dict[str, list[torch.Tensor]] = {req_id: [] for req_id in texts}
    ends: dict[str, tuple[str, str | None]] = {}
    while engine.has_work():
        outputs, _ = engine.step()
        for output in outputs:
            if CODES in output.multimodal:
                frames[output.req_id].append(output.multimodal[CODES])
            if output.finish_reason is not None:
                assert output.req_id not in ends, "a request ends once"
                ends[output.req_id] = (output.finish_reason, output.error)
    empty = torch.empty(0, 4, dtype=torch.long)
    return {req_id: Spoken(torch.cat([empty, *frames[req_id]]), *ends[req_id]) for req_id in texts}


def cases(trace: Sequence[StepRow]) -> set[str]:
    """Which of the hard cases a step log shows."""
    return set(count_cases(trace))


def count_cases(trace: Sequence[StepRow]) -> Counter[str]:
    """How often a step log shows each of the hard cases; ``replay`` counts spans."""
    found: Counter[str] = Counter()
    steps: dict[int, list[StepRow]] = {}
    replaying: set[str] = set()
    for row in trace:
        steps.setdefault(row.step, []).append(row)
        end = row.num_computed + row.span
        if row.is_resumed:
            replaying.add(row.req_id)
        is_replay = row.req_id in replaying
        if row.is_prefill and not is_replay and row.num_computed > 0:
            found["offset_chunk"] += 1
            if row.span == 1 and end == row.prompt_len:
                found["one_token_tail"] += 1
        if is_replay:
            found["replay"] += 1
            if row.num_computed < row.prompt_len < end:
                found["boundary_replay"] += 1
            if row.num_computed >= row.prompt_len and end < row.num_known:
                found["replay_past_prompt"] += 1
                if row.span == 1:
                    found["one_token_replay_tail"] += 1
            if end == row.num_known:
                replaying.discard(row.req_id)
    ordered = [[row.req_id for row in rows] for _, rows in sorted(steps.items())]
    for before, after in itertools.pairwise(ordered):
        stayed = [req_id for req_id in before if req_id in after]
        if len(before) > len(after) and stayed != [req_id for req_id in after if req_id in before]:
            found["reorder"] += 1
    return found
