"""Rows to hooks to embeddings, in place (PC-4 to PC-10, PC-14, EX-16)."""

from __future__ import annotations

from typing import Any

import torch

from stagevox.contract import (
    MTP_INPUTS,
    Capabilities,
    RowPhase,
    Update,
    check_batch,
    check_mtp_inputs,
    check_row,
)
from stagevox.errors import ContractError

from .border import call_hook, copying
from .buffer import IntermediateBuffer
from .mtp import MTPRows
from .rows import is_decode_row


class HookRouter:
    """Sends each row of a step to its hook and writes the embeddings into the runner's input buffer.

    ``out [max_tokens, H]`` is that buffer, ``input_ids [num_tokens]`` the step's ids, changed in place if a hook changes them.
    """

    def __init__(self, model: Any, capabilities: Capabilities, buffer: IntermediateBuffer, out: torch.Tensor) -> None:
        self.model = model
        self.capabilities = capabilities
        self.buffer = buffer
        self.out = out
        self.hidden_size = out.shape[1]

    def run(self, rows: list[RowPhase], input_ids: torch.Tensor) -> MTPRows | None:
        """Preprocess one step; returns the decode rows that wait for ``talker_mtp``, or None."""
        capabilities, failed, logs = self.capabilities, self.buffer.failed, self.buffer.logs
        batched = capabilities.has_decode_batch
        if capabilities.has_preprocess_batch:
            self._prepare(rows, input_ids)
        mtp: list[MTPRows] = []
        pending: list[RowPhase] = []
        for row in rows:
            if row.req_id in failed:
                pending = self._flush(pending, input_ids, mtp)
                self.out[row.start : row.end].zero_()
                continue
            log = logs.get(row.req_id) if logs else None
            decode = is_decode_row(row, in_log=log is not None and row.num_computed in log)
            if decode and batched:
                # Without MTP a batch is a run of neighbours; with it, all decode rows of the step go in one call.
                pending.append(row)
                continue
            if not capabilities.has_talker_mtp:
                pending = self._flush(pending, input_ids, mtp)
            self._span(row, input_ids, decode, mtp)
        self._flush(pending, input_ids, mtp)
        if not mtp:
            return None
        return mtp[0] if len(mtp) == 1 else _join(mtp)

    def _info(self, row: RowPhase) -> dict[str, Any]:
        return {**self.buffer[row.req_id], **row.fields()}

    def _fail(self, row: RowPhase, error: ContractError) -> None:
        self.buffer.failed[row.req_id] = error
        self.out[row.start : row.end].zero_()

    def _prepare(self, rows: list[RowPhase], input_ids: torch.Tensor) -> None:
        infos = self.buffer.gather(row.req_id for row in rows)
        try:
            call_hook("preprocess_batch", self.model.preprocess_batch, input_ids=input_ids, req_infos=infos)
        except ContractError as error:
            for row in rows:
                self._fail(row, error)

    def _span(self, row: RowPhase, input_ids: torch.Tensor, decode: bool, mtp: list[MTPRows]) -> None:
        """One request's span through ``preprocess``; logged positions are then filled from the log."""
        ids = input_ids[row.start : row.end]
        try:
            base = call_hook("embed_input_ids", self.model.embed_input_ids, ids)
            result = call_hook("preprocess", self.model.preprocess, ids, base, **self._info(row))
            new_ids, embeds, update = check_row(result, row.span, self.hidden_size)
            inputs = None
            if MTP_INPUTS in update:
                update = {key: value for key, value in update.items() if key != MTP_INPUTS}
                if decode and self.capabilities.has_talker_mtp:
                    inputs = check_mtp_inputs(result[2][MTP_INPUTS], self.hidden_size)
            target = self.out[row.start : row.end]
            with copying("preprocess"):
                if new_ids is not ids:
                    ids.copy_(new_ids)
                target.copy_(embeds)
        except ContractError as error:
            self._fail(row, error)
            return
        log = self.buffer.logs.get(row.req_id)
        if log is not None:
            log.fill(target, row.num_computed)
        self.buffer.apply(row.req_id, update)
        if inputs is not None:
            mtp.append(MTPRows([row], ids, target, *inputs))

    def _flush(self, pending: list[RowPhase], input_ids: torch.Tensor, mtp: list[MTPRows]) -> list[RowPhase]:
        """Send the waiting decode rows to the batch hook; returns an empty list to wait in next."""
        if pending:
            self._decode_batch(pending, input_ids, mtp)
        return []

    def _decode_batch(self, rows: list[RowPhase], input_ids: torch.Tensor, mtp: list[MTPRows]) -> None:
        """A batch of decode rows through ``preprocess_decode_batch``; on failure each row alone, to find the guilty one."""
        first, count = rows[0].start, len(rows)
        adjacent = rows[-1].start - first + 1 == count
        where: slice | list[int] = slice(first, first + count) if adjacent else [row.start for row in rows]
        ids = input_ids[where]
        use_mtp = self.capabilities.has_talker_mtp
        try:
            infos = [self._info(row) for row in rows]
            result = call_hook("preprocess_decode_batch", self.model.preprocess_decode_batch, input_ids=ids, req_infos=infos)
            check_batch(result, count, self.hidden_size, mtp=use_mtp)
            with copying("preprocess_decode_batch"):
                if result[0] is not ids:
                    input_ids[where] = result[0].to(input_ids)
                self.out[where] = result[1].to(self.out)
        except ContractError as error:
            if count == 1:
                self._fail(rows[0], error)
                return
            for row in rows:
                before = len(mtp)
                self._decode_batch([row], input_ids, mtp)
                if len(mtp) > before:  # the next call may write over what this one returned
                    mtp[-1] = MTPRows([row], *(column.clone() for column in mtp[-1][1:]))
            return
        updates: list[Update] = result[-1]
        if any(updates):
            for row, update in zip(rows, updates, strict=True):
                self.buffer.apply(row.req_id, {key: value for key, value in update.items() if key != MTP_INPUTS})
        if use_mtp:
            mtp.append(MTPRows(rows, result[0], result[1], result[2], result[3]))


def _join(parts: list[MTPRows]) -> MTPRows:
    return MTPRows(
        [row for part in parts for row in part.rows], *(torch.cat(column) for column in list(zip(*parts, strict=True))[1:])
    )
