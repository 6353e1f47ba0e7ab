"""Several steps' tokens and outputs as one result (MS-9, MS-10)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch

from stagevox.errors import HookShapeError

from ..outputs import Outputs

ANY_STEP = frozenset({"meta.turn_end"})
"""Marks that hold for the window if they held in any of its steps. Of other values that are no rows the last one counts."""


class WindowTokens:
    """A window's tokens, step by step, and where each request's end."""

    def __init__(self, req_ids: Sequence[str], stops: Sequence[Set[int]]) -> None:
        self.req_ids = req_ids
        self._stops = stops
        self._steps: list[list[int]] = []
        self._ended: set[int] = set()
        self.failed_at: dict[int, int] = {}

    def add(self, ids: list[int], failed: Mapping[str, BaseException]) -> bool:
        """Take a step's token of each row, and who has failed by now; True once no row has a use for another step."""
        step = len(self._steps)
        self._steps.append(ids)
        for row, (token, stops) in enumerate(zip(ids, self._stops, strict=True)):
            if token in stops:
                self._ended.add(row)
        if failed:
            self.add_failures(step, failed)
        return len(self._ended) == len(self.req_ids)

    def add_failures(self, step: int, failed: Mapping[str, BaseException]) -> None:
        """Note who fails in ``step``."""
        for row, req_id in enumerate(self.req_ids):
            if req_id in failed:
                self.failed_at[row] = min(step, self.failed_at.get(row, step))
                self._ended.add(row)

    def columns(self) -> list[list[int]]:
        """All ids of each row, those past its end included."""
        return [list(column) for column in zip(*self._steps, strict=True)]

    def shipped(self) -> tuple[list[list[int]], dict[str, int]]:
        """Each row's tokens up to its stop or its failure, and for each request that failed before it stopped how many there are."""
        shipped, failed = [], {}
        for row, ids in enumerate(self.columns()):
            end = next((index + 1 for index, token in enumerate(ids) if token in self._stops[row]), len(ids))
            fault = self.failed_at.get(row)
            if fault is not None and fault < end:
                end = failed[self.req_ids[row]] = fault
            shipped.append(ids[:end])
        return shipped, failed


def merge_outputs(steps: Sequence[Outputs], counts: Mapping[str, int]) -> tuple[Outputs, dict[str, BaseException]]:
    """Each request's outputs of its first ``counts[req_id]`` steps: rows joined in order, marks and values as :data:`ANY_STEP` says.

    Beside them the error of each request whose rows don't join, since their shape or type changed from step to step.
    """
    merged: Outputs = {}
    faults: dict[str, BaseException] = {}
    for req_id, count in counts.items():
        named: dict[str, list[Any]] = {}
        for step in steps[:count]:
            for key, value in step.get(req_id, {}).items():
                named.setdefault(key, []).append(value)
        if not named:
            continue
        try:
            merged[req_id] = {key: _merged(key, values) for key, values in named.items()}
        except (RuntimeError, TypeError) as error:
            faults[req_id] = HookShapeError("make_omni_output", f"returned rows that don't join those before them: {error}")
    return merged, faults


def _merged(key: str, values: list[Any]) -> Any:
    last = values[-1]
    if isinstance(last, torch.Tensor) and last.dim():
        return torch.cat(values)
    if key in ANY_STEP:
        return type(last)(any(map(bool, values))) if isinstance(last, bool | int) else any(map(bool, values))
    return last
