"""Families end to end: tiny engines, what the references said, and what a step log shows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file

from stagevox.bench.checkpoints.weights import digest
from stagevox.config.blueprint import Blueprint
from stagevox.config.topology import Topology
from stagevox.omni import Omni, OmniResult

GOLDEN = Path(__file__).resolve().parents[1] / "oracles" / "golden"

TINY: Mapping[str, Any] = {"gpu_memory_utilization": 0.02, "block_size": 32, "kv_cache_memory_bytes": 8 << 20}
"""Engine arguments of a stage with a KV cache. Its pool can be made smaller with ``num_gpu_blocks_override``."""

LEAST_MARGIN = 1e-3
"""Greedy choices nearer to a tie than this are no evidence."""


class Golden(NamedTuple):
    """What a family's reference made of its tiny checkpoint."""

    cases: Mapping[str, Mapping[str, Any]]
    waveforms: Mapping[str, np.ndarray]
    facts: Mapping[str, Any]
    """All else that ``golden.json`` says."""

    @classmethod
    def read(cls, family: str, checkpoint: Path) -> Golden:
        """Read the golden values; they must have been made from this very checkpoint."""
        facts = json.loads((GOLDEN / family / "golden.json").read_text(encoding="utf-8"))
        assert facts["checkpoint"] == digest(checkpoint), "make the golden values anew: python tools/oracles/run.py"
        return cls(facts.pop("cases"), load_file(GOLDEN / family / "waveforms.safetensors"), facts)


def omni(topology: Topology, overrides: Mapping[str, Mapping[str, Any]], **options: Any) -> Omni:
    """A model made of ``topology``, ``overrides`` laid over small engines."""
    small = {stage.name: {**TINY, **overrides.get(stage.name, {})} for stage in topology.stages}
    return Omni(replace(Blueprint.of(topology.checkpoint, small), topology=topology), **options)


def say(model: Omni, prompts: Sequence[Mapping[str, Any]], params: Sequence[Mapping[str, Any]]) -> list[OmniResult]:
    """Speak all prompts at once; afterwards nothing may be left behind."""
    results = model.generate(list(prompts), list(params))
    model.assert_idle()
    return results


def token_ids(model: Omni, call: Callable[[Any], Any], stage: str = "thinker") -> dict[str, list[int]]:
    """The ids that a stage returned by request while ``call(on_event)`` ran."""
    seen: dict[str, list[int]] = {}

    def note(event: Any) -> None:
        if getattr(event, "stage", None) == stage:
            seen.setdefault(event.output.req_id, []).extend(event.output.new_token_ids)

    call(note)
    return seen
