"""The Talker: vLLM's mixture-of-experts decoder over codec frames, conditioned by what the Thinker read and wrote."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.interfaces import SupportsMRoPE
from vllm.model_executor.models.qwen3_moe import Qwen3MoeModel
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from stagevox.errors import MissingStateError
from stagevox.models.cpu_decoder import shorten
from stagevox.models.qwen3_talker.code_predictor import CodePredictor
from stagevox.models.qwen3_talker.hooks import Info, Qwen3TalkerHooks
from stagevox.models.qwen3_talker.sampling import suppressed
from stagevox.models.qwen3_talker.text_projection import TextProjection

from .config import chat_ids, codec_ids

USER = "user_rows"
"""State: ``[U, H thinker]``, the Thinker's rows of what the user said, turn after turn."""

USER_MEDIA = "user_media"
"""State: bool ``[U]``, which of these are media."""

HEAD = "head_rows"
"""State: ``[3, H thinker]``, the rows with which the reply begins: ``<|im_start|>assistant`` and a line break."""

REPLY = "reply_rows"
"""State: ``[K, H thinker]``, the rows of the reply's tokens, as many as there are so far."""

REPLY_LENGTH = "reply_length"
"""State: K once the reply is whole; till then no position is asked for that would need it."""

SPEAKER = "speaker"
"""State: the speaker's name."""

HEAD_ROWS = 9
"""Prompt positions after the user's: three of the reply's head, four pads, the begin of text, the first token of the reply."""

THINKER_TABLE = "thinker.model.embed_tokens.weight"


class Qwen3OmniTalker(nn.Module, Qwen3TalkerHooks, SupportsMRoPE):
    """Rows by position, with P the text projection, M that of media, E the Thinker's embeddings and C the codes' (layer 0):

    - ``p < U``: P(user row p), or M(user row p) at media;
    - then 3: P(head row); then 4 pads: P(E(tts_pad)), with C(no think), C(begin, end of thought), C(speaker);
    - P(E(tts_bos)) + C(pad); P(reply row 0) + C(bos): the prompt ends;
    - frame k: its code embeddings, and P(reply row k + 1), then once P(E(tts_eos)), then P(E(tts_pad)) for ever.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.shortened: bool | None = None
        self.vllm_config = vllm_config
        model_config = vllm_config.model_config
        config, text, quant = model_config.hf_config, model_config.hf_text_config, vllm_config.quant_config
        folder = Path(model_config.model)
        codec, chat = codec_ids(folder), chat_ids(folder)
        self.chat_rows = [chat.tts_bos, chat.tts_eos, chat.tts_pad]
        self.speakers = codec.speakers
        self.model = Qwen3MoeModel(vllm_config=vllm_config, prefix=_join(prefix, "model"))
        self.codec_head = ParallelLMHead(
            text.vocab_size, text.hidden_size, quant_config=quant, prefix=_join(prefix, "codec_head")
        )
        self.logits_processor = LogitsProcessor(text.vocab_size)
        sizes = (config.thinker_hidden_size, text.intermediate_size, text.hidden_size, text.hidden_act)
        self.text_projection = TextProjection(*sizes, quant, _join(prefix, "text_projection"))
        self.hidden_projection = TextProjection(*sizes, quant, _join(prefix, "hidden_projection"))
        predictor = config.code_predictor_config
        self.code_predictor = CodePredictor(predictor, text.hidden_size, quant, _join(prefix, "code_predictor"))
        self.tts_rows = nn.Parameter(torch.empty(3, config.thinker_hidden_size), requires_grad=False)
        before = [*codec.prefix, 0, codec.pad, codec.bos]
        self.register_buffer("head_codes", torch.tensor(before), persistent=False)
        self.register_buffer("forbidden", suppressed(text.vocab_size, codec.eos), persistent=False)

    # what vLLM calls

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Layer-0 code embeddings ``[n, H]``."""
        embeds: torch.Tensor = self.model.embed_input_ids(input_ids)
        return embeds

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Hidden states ``[n, H]`` after the last norm; ``positions [3, n]``."""
        if self.shortened is None:
            self.shortened = shorten(self.model, self.vllm_config)
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Logits ``[n, vocabulary]``; control ids but the end are never sampled."""
        logits: torch.Tensor | None = self.logits_processor(self.codec_head, hidden_states)
        return None if logits is None else logits.masked_fill_(self.forbidden, -math.inf)

    def get_mrope_input_positions(self, input_tokens: list[int], mm_features: list[Any]) -> tuple[torch.Tensor, int]:
        """Positions of a prompt without media, ``[3, n]``; with media they come with the request's input."""
        return torch.arange(len(input_tokens)).expand(3, -1), 0

    hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"talker.model.codec_embedding.": "model.embed_tokens.", "talker.": ""})

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load ``talker.*``, and of the Thinker's embeddings the three that the Talker adds by itself."""
        loaded = AutoWeightsLoader(self).load_weights(self._own(weights), mapper=self.hf_to_vllm_mapper)
        return loaded | {"tts_rows"}

    def _own(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if name == THINKER_TABLE:
                self.tts_rows.data.copy_(tensor[self.chat_rows])
            elif name.startswith("talker."):
                yield name, tensor

    # what conditions a position

    def prompt_length(self, hook: str, info: Info) -> int:
        """U + 9."""
        for key in (USER, USER_MEDIA, HEAD, SPEAKER):
            if info.get(key) is None:
                raise MissingStateError(hook, f"{key} was never stored")
        if info[SPEAKER] not in self.speakers:
            raise MissingStateError(hook, f"{SPEAKER} is {info[SPEAKER]!r}, expected one of {', '.join(self.speakers)}")
        return len(info[USER]) + HEAD_ROWS

    def prompt_rows(self, info: Info, first: int, end: int) -> torch.Tensor:
        """Rows ``[end - first, H]`` of the prompt."""
        said, media = info[USER][first:end], info[USER_MEDIA][first:end]
        parts = [self._user_rows(said, media)]
        ahead = len(info[USER])
        if end > ahead:
            parts.append(self._head_rows(info, max(first - ahead, 0), end - ahead))
        return torch.cat(parts)

    def text_rows(self, infos: Sequence[Info], steps: Sequence[int]) -> torch.Tensor:
        """Text rows ``[N, H]`` of frames ``steps``."""
        return self._project(torch.stack([self._text_row(info, step + 1) for info, step in zip(infos, steps, strict=True)]))

    def _user_rows(self, rows: torch.Tensor, media: torch.Tensor) -> torch.Tensor:
        rows, media = self._here(rows), media.to(self.tts_rows.device)
        made = self.text_projection(rows)
        if media.any():
            made[media] = self.hidden_projection(rows[media])
        return made

    def _head_rows(self, info: Info, first: int, end: int) -> torch.Tensor:
        """Of the nine positions after the user's, ``first .. end - 1``."""
        bos, _, pad = self.tts_rows
        rows = [*self._here(info[HEAD]), pad, pad, pad, pad, bos]
        if end == HEAD_ROWS:
            rows.append(self._text_row(info, 0))
        text = self._project(torch.stack(rows[first:end]))
        codes = self.head_codes.clone()
        codes[3] = self.speakers[info[SPEAKER]]
        plain = HEAD_ROWS - len(codes)
        if end > plain:
            text[max(plain - first, 0) :] += self.embed_input_ids(codes[max(first - plain, 0) : end - plain])
        return text

    def _text_row(self, info: Info, index: int) -> torch.Tensor:
        """What is projected for the reply's token ``index``, ``[H thinker]``: its row, the end's, past it the pad's."""
        reply, whole = info.get(REPLY), info.get(REPLY_LENGTH)
        if reply is not None and index < len(reply):
            row: torch.Tensor = self._here(reply[index])
            return row
        if whole is None:
            raise MissingStateError("preprocess", f"{REPLY} has no row {index}, and the reply has not ended")
        _, eos, pad = self.tts_rows
        return eos if index == whole else pad

    def _here(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.to(self.tts_rows)

    def _project(self, rows: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.text_projection(rows)
        return projected


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
