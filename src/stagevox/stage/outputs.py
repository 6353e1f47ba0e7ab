"""From a step's tensors to outputs by request (EX-5, EX-14, RT-6, RT-7).

Two halves. :func:`plan_outputs` runs in the order of the steps, before the next one can reuse anything: it decides who gets which
rows, and books them. :class:`StepOutputs` is the rest of the work, copies to the host and slicing; it depends on nothing else any more,
so that it can be done later and by another thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from stagevox.contract import CODES, HIDDEN, OwnedBatchTensor, RowPhase
from stagevox.errors import HookCountError, HookShapeError

from .host_copy import HostCopy, HostCopyBatch

Outputs = dict[str, dict[str, Any]]
"""``req_id`` to named values of this step."""

Held = dict[str, list[torch.Tensor]]
"""By name, rows of earlier positions that did not go out yet."""


class OutputMemory:
    """Which positions' rows were taken already, and rows that wait until their request is sampled."""

    def __init__(self) -> None:
        self.taken: dict[str, int] = {}
        self.held: dict[str, Held] = {}

    def drop(self, req_id: str) -> None:
        """Forget a request."""
        self.taken.pop(req_id, None)
        self.held.pop(req_id, None)


class Share(NamedTuple):
    """A request's share of a step: the rows ``[start, end)`` of the token axis, after those held so far."""

    req_id: str
    start: int
    end: int
    held: Held


class StepOutputs:
    """One step's outputs, still to be made: nothing in it belongs to the model or to the next step once ``copy`` has returned."""

    def __init__(self, rows: Sequence[RowPhase], shares: Sequence[Share]) -> None:
        self.req_ids = [row.req_id for row in rows]
        """Everyone in the step: whose outputs are lost if they can't be made."""
        self._shares = shares
        self._batch = HostCopyBatch()
        self._runs, self._places = _runs(shares)
        self._aligned: dict[str, list[HostCopy]] = {}
        self._held = [
            {name: [self._batch.add(OwnedBatchTensor(part)) for part in parts] for name, parts in share.held.items()}
            for share in shares
        ]
        self._single: list[tuple[str, str, Any]] = []

    def add_aligned(self, name: str, value: torch.Tensor | OwnedBatchTensor) -> None:
        """A value ``[>= num_tokens, ...]`` along the token axis."""
        tensor, owned = _plain(value), isinstance(value, OwnedBatchTensor)
        parts = (tensor[start:end] for start, end in self._runs)
        self._aligned[name] = [self._batch.add(OwnedBatchTensor(part) if owned else part) for part in parts]

    def add_single(self, req_id: str, name: str, value: Any) -> None:
        """One value of one request."""
        given = value.tensor if isinstance(value, OwnedBatchTensor) else value
        self._single.append((req_id, name, self._batch.add(value) if isinstance(given, torch.Tensor) else given))

    def copy(self) -> None:
        """Start the copies to the host."""
        self._batch.copy()

    @torch.inference_mode()
    def result(self) -> Outputs:
        """The outputs by request, tensors on the host; waits for the copies."""
        self._batch.copy()
        self._batch.wait()
        outputs: Outputs = {}
        for share, (run, offset), held in zip(self._shares, self._places, self._held, strict=True):
            named = outputs[share.req_id] = {}
            count = share.end - share.start
            for name in self._aligned | held if held else self._aligned:
                parts = [copy.tensor for copy in held.get(name, ())]
                if count and name in self._aligned:
                    parts.append(self._aligned[name][run].tensor[offset : offset + count])
                if parts:
                    named[name] = torch.cat(parts) if parts[1:] else parts[0]
        for req_id, name, value in self._single:
            outputs.setdefault(req_id, {})[name] = value.tensor if isinstance(value, HostCopy) else value
        return outputs


def _runs(shares: Sequence[Share]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The shares' rows as few runs ``[start, end)`` of neighbours, and for each share its run and its offset there."""
    runs: list[tuple[int, int]] = []
    places = []
    for share in shares:
        if share.start == share.end:
            places.append((-1, 0))
            continue
        if runs and runs[-1][1] == share.start:
            runs[-1] = (runs[-1][0], share.end)
        else:
            runs.append((share.start, share.end))
        places.append((len(runs) - 1, share.start - runs[-1][0]))
    return runs, places


def plan_outputs(
    rows: Sequence[RowPhase],
    values: Mapping[str, Any] | None,
    num_tokens: int,
    memory: OutputMemory | None = None,
    *,
    codes: Mapping[str, torch.Tensor] | None = None,
    hook: str = "make_omni_output",
    snapshot: bool = False,
) -> StepOutputs | None:
    """Decide what each request gets of a step's ``multimodal_outputs``, which ``hook`` returned, and of its ``codes [n, Q]``.

    A tensor is cut along its first axis, the token axis (rows past ``num_tokens`` are padding). Each position's row goes out once:
    rows of a request that is not sampled in this step wait for the step in which it is, and a replay's rows were taken
    before. A sequence holds one value a request, and goes out if the request is sampled. Codes are the runner's own, never written
    again. None if there is nothing to hand out.

    ``snapshot`` copies what the model may write again at once, on its device; else ``StepOutputs.copy`` must be called before that.
    """
    shares: list[Share] = []
    aligned: dict[str, torch.Tensor | OwnedBatchTensor] = {}
    if values:
        _check(rows, values, num_tokens, hook)
        for name, value in values.items():
            if isinstance(value, torch.Tensor | OwnedBatchTensor):
                aligned[name] = OwnedBatchTensor(owned(value, num_tokens)) if snapshot else value
        shares = _book(rows, aligned, OutputMemory() if memory is None else memory)
    if not (shares or codes):
        return None
    made = StepOutputs(rows, shares)
    for name, tensor in aligned.items():
        made.add_aligned(name, tensor)
    for name, value in (values or {}).items():
        if name not in aligned:
            for row, one in zip(rows, value, strict=True):
                if row.is_sampled:
                    made.add_single(row.req_id, name, _kept(one) if snapshot else one)
    for req_id, frames in (codes or {}).items():
        made.add_single(req_id, CODES, OwnedBatchTensor(frames))
    return made


def owned(value: Any, num_tokens: int | None = None) -> Any:
    """The tensor of an :class:`OwnedBatchTensor`; any other tensor copied, or its first rows, since its storage may be reused."""
    if isinstance(value, OwnedBatchTensor):
        return value.tensor
    return value[:num_tokens].clone() if isinstance(value, torch.Tensor) else value


def _kept(value: Any) -> Any:
    return OwnedBatchTensor(owned(value)) if isinstance(value, torch.Tensor) else value


def client_facing(outputs: Outputs) -> Outputs:
    """The outputs without what only the next stage may see; a mapping of its own."""
    shown = ((req_id, {key: value for key, value in named.items() if not _is_hidden(key)}) for req_id, named in outputs.items())
    return {req_id: named for req_id, named in shown if named}


def _is_hidden(key: str) -> bool:
    return key == HIDDEN or key.startswith(HIDDEN + ".")


def _plain(value: torch.Tensor | OwnedBatchTensor) -> torch.Tensor:
    return value.tensor if isinstance(value, OwnedBatchTensor) else value


def _check(rows: Sequence[RowPhase], values: Mapping[str, Any], num_tokens: int, hook: str) -> None:
    """Raise a :class:`stagevox.errors.ContractError` for what can't be cut, before anything is booked."""
    for name, value in values.items():
        if isinstance(value, torch.Tensor | OwnedBatchTensor):
            tensor = _plain(value)
            if not isinstance(tensor, torch.Tensor) or not tensor.dim():
                raise HookShapeError(hook, f"{name} has no token axis")
            if tensor.shape[0] < num_tokens:
                raise HookCountError(hook, f"rows of {name}", num_tokens, tensor.shape[0])
        elif isinstance(value, list | tuple):
            if len(value) != len(rows):
                raise HookCountError(hook, f"values of {name}", len(rows), len(value))
        else:
            raise HookShapeError(hook, f"{name} is a {type(value).__name__}, not a tensor or a sequence")


def _book(rows: Sequence[RowPhase], aligned: Mapping[str, torch.Tensor | OwnedBatchTensor], memory: OutputMemory) -> list[Share]:
    """Who gets which rows now; those of requests that are not sampled are held."""
    shares = []
    for row in rows:
        fresh = max(0, memory.taken.get(row.req_id, 0) - row.num_computed)
        start = row.start + min(fresh, row.span)
        if row.is_sampled:
            shares.append(Share(row.req_id, start, row.end, memory.held.pop(row.req_id, {})))
        elif start < row.end:
            held = memory.held.setdefault(row.req_id, {})
            for name, value in aligned.items():
                part = _plain(value)[start : row.end]
                held.setdefault(name, []).append(part if isinstance(value, OwnedBatchTensor) else part.clone())
        memory.taken[row.req_id] = max(memory.taken.get(row.req_id, 0), row.num_computed + row.span)
    return shares
