"""Runner-managed MTP: complete the frames of a step's decode rows (PC-8, EX-8)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from stagevox.contract import RowPhase, check_mtp
from stagevox.errors import ContractError

from .border import call_hook, copying
from .buffer import IntermediateBuffer


class MTPRows(NamedTuple):
    """Decode rows of one step, gathered for one call."""

    rows: list[RowPhase]
    input_ids: torch.Tensor
    input_embeds: torch.Tensor
    last_hidden: torch.Tensor
    text_step: torch.Tensor

    def select(self, index: int) -> MTPRows:
        """The same, for one row only."""
        one = slice(index, index + 1)
        return MTPRows(self.rows[one], self.input_ids[one], self.input_embeds[one], self.last_hidden[one], self.text_step[one])


def complete_frames(
    model: Any, batch: MTPRows, out: torch.Tensor, buffer: IntermediateBuffer, *, with_infos: bool = False
) -> dict[str, torch.Tensor]:
    """Call ``talker_mtp``, write its embeddings into ``out [num_tokens, H]`` at each row's own offset, log the frames.

    ``with_infos`` hands the model each row's state and phase, too.

    Returns the new codes ``[1, Q]`` by request. If the call fails, each row is tried
    alone, so that only the guilty request fails.
    """
    rows = batch.rows
    first = rows[0].start
    infos = {"req_infos": [{**buffer[row.req_id], **row.fields()} for row in rows]} if with_infos else {}
    try:
        result = call_hook("talker_mtp", model.talker_mtp, *batch[1:], **infos)
        embeds, codes = check_mtp(result, len(rows), out.shape[1])
        with copying("talker_mtp"):
            embeds, codes = embeds.clone(), codes.clone()
            if rows[-1].start - first + 1 == len(rows):
                out[first : first + len(rows)] = embeds
            else:
                out[[row.start for row in rows]] = embeds.to(out)
    except ContractError as error:
        if len(rows) > 1:
            merged: dict[str, torch.Tensor] = {}
            for index in range(len(rows)):
                merged |= complete_frames(model, batch.select(index), out, buffer, with_infos=with_infos)
            return merged
        row = rows[0]
        buffer.failed[row.req_id] = error
        out[row.start].zero_()
        return {}
    for index, row in enumerate(rows):
        buffer.log(row.req_id, row.prompt_len).append(row.num_computed, embeds, codes, index)
    return {row.req_id: codes[index : index + 1] for index, row in enumerate(rows)}
