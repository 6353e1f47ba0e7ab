"""The Talker: a causal LM over codec frames, conditioned on one text row a position."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.config import CompilationMode, VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding import get_rope

from stagevox.contract import MTP_INPUTS, NUM_COMPUTED_TOKENS, PROMPT_LEN, MTPBatchResult, RowResult, Update
from stagevox.errors import CapabilityError, CheckpointError, ContractError, MissingStateError

from .code_predictor import CodePredictor
from .config import MiniTalkerConfig
from .layers import add_rms_norm, linear, load_strict, rms_norm, weight

TEXT_ROWS = "text_rows"
"""State: LongTensor ``[K]`` of the text's piece ids, the EOS row's id last."""

VOICE = "voice"
"""State: the name of the voice."""

LAST_HIDDEN = "last_hidden"
"""State: ``[1, H]``, the hidden state that the newest layer-0 code was sampled from."""


class TalkerLayer(nn.Module):
    """Pre-norm attention over vLLM's paged KV cache, and a gated MLP."""

    def __init__(self, config: MiniTalkerConfig, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        size, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
        self.input_norm = weight(size)
        self.qkv = weight(3 * heads * head_dim, size)
        self.rope = get_rope(head_dim, config.max_position_embeddings, rope_parameters=config.rope_parameters)
        self.attn = Attention(heads, head_dim, head_dim**-0.5, cache_config=vllm_config.cache_config, prefix=f"{prefix}.attn")
        if vllm_config.compilation_config.mode == CompilationMode.NONE:
            self.attn.use_direct_call = True  # a custom op is for graphs; without one it only costs
        self.o = weight(size, heads * head_dim)
        self.post_norm = weight(size)
        self.gate_up = weight(2 * config.intermediate_size, size)
        self.down = weight(size, config.intermediate_size)

    def plan(self) -> tuple[Any, ...]:
        """The layer's parts in the order of use."""
        return (
            linear(self.qkv),
            self.rope.forward,
            self.attn.forward,
            linear(self.o),
            self.post_norm.data,
            linear(self.gate_up),
            linear(self.down),
        )


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``[gate | up]``."""
    if not x.is_cpu:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    torch.ops._C.silu_and_mul(out, x)
    return out


class MiniTalker(nn.Module):
    """Embedding tables and decoder layers; parameter names are those of the checkpoint."""

    def __init__(self, config: MiniTalkerConfig, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        size = config.hidden_size
        self._plan: tuple[Any, ...] | None = None
        self.eps = config.rms_norm_eps
        self.sizes = [config.vocab_size, *config.codebook_sizes[1:]]
        self.codec_embedding = weight(sum(self.sizes), size)
        self.text_embedding = weight(config.text_vocab_size, size)
        self.speaker = weight(size)
        self.layers = nn.ModuleList(
            [TalkerLayer(config, vllm_config, f"{prefix}.layers.{i}") for i in range(config.num_hidden_layers)]
        )
        self.norm = weight(size)
        # Rows past the codes and EOS are ids that only prompts use: their bias of -inf keeps them from being sampled.
        self.lm_head = weight(config.vocab_size, size)
        self.lm_bias = nn.Parameter(torch.zeros(config.vocab_size), requires_grad=False)
        self.num_logits = config.lm_head_size

    def _make_plan(self) -> tuple[Any, ...]:
        gains = [layer.input_norm.data for layer in self.layers] + [self.norm.data]
        own: list[Any] = list(self.layers)
        layers = [(*layer.plan(), gain) for layer, gain in zip(own, gains[1:], strict=True)]
        return gains[0], layers, linear(self.lm_head, self.lm_bias)

    @property
    def plan(self) -> tuple[Any, ...]:
        """First norm, layers, head: what a step calls."""
        if self._plan is None:
            self._plan = self._make_plan()
        return self._plan

    def forward(self, positions: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        """``embeds [n, H]`` to the hidden states after the last norm ``[n, H]``."""
        first_gain, layers, _ = self.plan
        eps, residual = self.eps, embeds.clone()
        x = rms_norm(embeds, first_gain, eps)
        for qkv, rope, attend, project, post_gain, gate_up, down, next_gain in layers:
            q, k, v = qkv(x).chunk(3, -1)
            q, k = rope(positions, q, k)
            x = add_rms_norm(project(attend(q, k, v)), residual, post_gain, eps)
            x = add_rms_norm(down(silu_and_mul(gate_up(x))), residual, next_gain, eps)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[n, H]`` to ``[n, vocabulary]``."""
        scores: torch.Tensor = self.plan[2](hidden)
        return scores

    def targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """Where each tensor of a checkpoint goes."""
        targets: dict[str, torch.Tensor] = {
            f"{prefix}{name}": tensor
            for name, tensor in self.named_parameters()
            if name not in ("codec_embedding", "lm_head", "lm_bias")
        }
        for q, table in enumerate(self.codec_embedding.split(self.sizes)):
            targets[f"{prefix}codec_embedding.{q}"] = table
        targets[f"{prefix}lm_head"] = self.lm_head[: self.num_logits]
        return targets


class MiniTalkerForCausalLM(nn.Module):
    """The packaged Talker with its code predictor, under the phase contract.

    What conditions position ``p`` is a function of the request and ``p`` alone. The prompt has 6 positions: 0 is the
    speaker, 1..4 are the text rows 0..3 with codec PAD, 5 is text row 4 with codec BOS. Position ``p >= 6`` carries frame
    ``p - 6`` with text row ``p - 1``. Text row ``k`` is the ``k``-th id of ``text_rows``, past its end the PAD row.
    """

    has_preprocess = True
    has_postprocess = True
    omni_pooler_payload_include_hidden = False
    supports_multi_step_decode = True

    code_offsets: torch.Tensor
    prompt_codes: torch.Tensor

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = self.config = vllm_config.model_config.hf_config
        if vllm_config.parallel_config.tensor_parallel_size > 1:
            raise CapabilityError("tensor_parallel_size", "the packaged talker is too small to be split", ("1",))
        name = f"{prefix}.talker" if prefix else "talker"
        self.talker = MiniTalker(config, vllm_config, name)
        self.code_predictor = CodePredictor(config)
        self.prompt_len = config.prompt_len
        self.pad_row = config.text_pad_id
        offsets = [0, *torch.tensor(self.talker.sizes).cumsum(0).tolist()[:-1]]
        self.register_buffer("code_offsets", torch.tensor(offsets), persistent=False)
        prompt = [config.codec_pad_id] * (self.prompt_len - 1) + [config.codec_bos_id]
        self.register_buffer("prompt_codes", torch.tensor(prompt), persistent=False)

    # what vLLM calls

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Layer-0 codec embeddings ``[num_tokens, H]``; real inputs come from the hooks."""
        return F.embedding(input_ids, self.talker.codec_embedding)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Hidden states ``[num_tokens, H]`` after the last norm."""
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed_input_ids(input_ids)
        return self.talker(positions, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Logits ``[n, 515]``; -inf for the two ids that only prompts use."""
        return self.talker.logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load all tensors; raises :class:`stagevox.errors.CheckpointError` on any that is missing, extra, misshapen or not finite."""
        targets = self.talker.targets("talker.") | self.code_predictor.targets("code_predictor.")
        load_strict("talker", weights, targets)
        for name, tensor in targets.items():
            if not tensor.isfinite().all():  # the likeliest of codes that are no numbers would be the first one
                raise CheckpointError("talker", f"tensor {name} holds values that are not finite")
        with torch.no_grad():
            self.talker.lm_head[self.talker.num_logits :] = 0
            self.talker.lm_bias[self.talker.num_logits :] = -math.inf
        return {name for name, _ in self.named_parameters()}

    # the phase contract

    def preprocess(self, input_ids: torch.Tensor, input_embeds: torch.Tensor, **info: Any) -> RowResult:
        """Condition one span. Rows of generated positions lack their frame: MTP or the runner's log adds it."""
        start, span = info[NUM_COMPUTED_TOKENS], len(input_ids)
        rows = self._text_rows("preprocess", info)
        embeds = F.embedding(self._row_ids(rows, start - 1, span), self.talker.text_embedding)
        if start >= self.prompt_len:
            return input_ids, embeds, {MTP_INPUTS: (self._last_hidden("preprocess", info), embeds[-1:])}
        prompt = self.prompt_codes[start : start + span]
        embeds[: len(prompt)] += F.embedding(prompt, self.talker.codec_embedding)
        if start == 0:
            embeds[0] = self.talker.speaker
        return input_ids, embeds, {}

    def preprocess_decode_batch(self, *, input_ids: torch.Tensor, req_infos: Sequence[Mapping[str, Any]]) -> MTPBatchResult:
        """Condition fresh decode rows; the frame's embedding is added by :meth:`talker_mtp`."""
        ids, hidden = [], []
        for info in req_infos:
            rows, row = self._text_rows("preprocess_decode_batch", info), info[NUM_COMPUTED_TOKENS] - 1
            ids.append(rows[row].item() if row < len(rows) else self.pad_row)
            hidden.append(self._last_hidden("preprocess_decode_batch", info))
        text = F.embedding(torch.tensor(ids, device=input_ids.device), self.talker.text_embedding)
        return input_ids, text, torch.cat(hidden), text, [_NO_UPDATE] * len(ids)

    def talker_mtp(
        self, input_ids: torch.Tensor, input_embeds: torch.Tensor, last_hidden: torch.Tensor, text_step: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Complete the frames that start with the layer-0 codes ``input_ids [N]``: ``(embeds [N, H], codes [N, 4])``."""
        codes = self.code_predictor(last_hidden, input_ids)
        return self.frame_embedding(codes).add_(text_step), codes

    def postprocess(self, hidden: torch.Tensor, **info: Any) -> Update:
        """Keep the hidden state that the next layer-0 code is sampled from."""
        return {LAST_HIDDEN: hidden[-1:].clone()}

    def frame_embedding(self, codes: torch.Tensor) -> torch.Tensor:
        """The sum of a frame's code embeddings, ``[N, Q]`` to ``[N, H]``."""
        return F.embedding_bag(codes + self.code_offsets, self.talker.codec_embedding, mode="sum")

    def _last_hidden(self, hook: str, info: Mapping[str, Any]) -> torch.Tensor:
        if LAST_HIDDEN not in info:
            raise MissingStateError(hook, f"{LAST_HIDDEN} was never stored")
        hidden: torch.Tensor = info[LAST_HIDDEN]
        return hidden

    def _text_rows(self, hook: str, info: Mapping[str, Any]) -> torch.Tensor:
        """The request's piece ids, after checks that its conditioning is whole."""
        rows: torch.Tensor | None = info.get(TEXT_ROWS)
        if rows is None:
            raise MissingStateError(hook, f"{TEXT_ROWS} was never stored")
        if info.get(VOICE) not in self.config.voices:
            raise MissingStateError(hook, f"{VOICE} is {info.get(VOICE)!r}, expected one of {self.config.voices}")
        if info[PROMPT_LEN] != self.prompt_len:
            raise ContractError(
                hook, f"the scheduled prompt has {info[PROMPT_LEN]} positions, the talker's has {self.prompt_len}"
            )
        return rows

    def _row_ids(self, rows: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """Piece ids of the text rows ``first .. first + count - 1`` on the model's device; PAD where there is no text."""
        lead = max(0, -first)
        known = rows[first + lead : first + count]
        ids = F.pad(known, (lead, count - lead - len(known)), value=self.pad_row)
        return ids.to(self.talker.text_embedding.device)


_NO_UPDATE: Mapping[str, Any] = {}
