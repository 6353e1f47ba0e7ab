"""The layout of a window's steps: one decode row a request, all of them, all the time (MS-9).

Positions, lengths, slots and attention metadata live in the runner's own buffers, which the first step has filled. They are
stepped in place; slots are looked up once for the whole window. Attention metadata is rebuilt each step by the backend's own builder:
a CPU backend's work partition and some GPU backends' plans depend on the lengths.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata


def window_positions(first: torch.Tensor, steps: int) -> torch.Tensor:
    """Positions of the steps after the first, step-major: ``first [n]`` becomes ``[steps - 1, n]``."""
    return first + torch.arange(1, steps, device=first.device, dtype=first.dtype).unsqueeze(1)


def window_slots(positions: torch.Tensor, blocks: torch.Tensor, block_size: int) -> torch.Tensor:
    """KV slots of ``positions [steps, n]`` in the requests' ``blocks [n, width]``; ``[steps, n]`` again."""
    owners = blocks.gather(1, (positions // block_size).T).T
    return owners * block_size + positions % block_size


class DecodeLayout:
    """Steps the runner's buffers through a window of ``steps`` steps, of which the first has run under ``context``."""

    def __init__(self, runner: Any, context: Any, steps: int) -> None:
        rows = runner.input_batch.num_reqs
        self._context = context
        self._runner = runner
        self._steppers = [runner.positions[:rows], runner.seq_lens[:rows], runner.optimistic_seq_lens_cpu[:rows]]
        if runner.uses_mrope:
            self._steppers.append(runner.mrope_positions.gpu[:, :rows])  # a generated position advances on all axes
        positions = window_positions(runner.positions[:rows], steps)
        tables = runner.input_batch.block_table.block_tables
        self._slots = [window_slots(positions, table.block_table.gpu[:rows], table.block_size).unbind() for table in tables]
        self._slot_buffers = [table.slot_mapping.gpu[:rows] for table in tables]
        self._longest = int(runner.optimistic_seq_lens_cpu[:rows].max())
        self._reqs, self._tokens = _padded(context, rows)
        self._tables = [table.get_device_tensor(self._reqs) for table in tables]
        self._mappings = [table.slot_mapping.gpu[: self._tokens] for table in tables]
        self._constant = {
            "query_start_loc": runner.query_start_loc.gpu[: self._reqs + 1],
            "query_start_loc_cpu": runner.query_start_loc.cpu[: self._reqs + 1],
            "seq_lens": runner.seq_lens[: self._reqs],
            "seq_lens_cpu_upper_bound": runner.optimistic_seq_lens_cpu[: self._reqs],
            "num_reqs": self._reqs,
            "num_actual_tokens": self._tokens,
            "max_query_len": 1,
            "positions": runner.positions[: self._tokens],
            "is_prefilling": torch.zeros(self._reqs, dtype=torch.bool),
        }

    def advance(self, step: int) -> None:
        """Make the buffers those of step ``step`` (1 is the first after the one that has run)."""
        for buffer in self._steppers:
            buffer.add_(1)
        for buffer, slots in zip(self._slot_buffers, self._slots, strict=True):
            buffer.copy_(slots[step - 1])
        metadata = self._context.attn_metadata
        for common, groups in zip(self.common_metadata(step), self._runner.attn_groups, strict=True):
            for group in groups:
                built = group.build_metadata(common)
                for layer in group.layer_names:
                    metadata[layer] = built

    def common_metadata(self, step: int) -> list[CommonAttentionMetadata]:
        """What each KV cache group's builder is given at ``step``; fresh objects, since builders may cache in them."""
        longest = self._longest + step
        return [
            CommonAttentionMetadata(max_seq_len=longest, block_table_tensor=table, slot_mapping=slots, **self._constant)
            for table, slots in zip(self._tables, self._mappings, strict=True)
        ]


def _padded(context: Any, rows: int) -> tuple[int, int]:
    """Requests and tokens that attention is told of: a replayed graph of the whole step sees its padding, which the first step has laid."""
    if context.cudagraph_runtime_mode != CUDAGraphMode.FULL:
        return rows, rows
    batch = context.batch_descriptor
    return batch.num_reqs or rows, batch.num_tokens
