"""Code2Wav: a causal convolutional net from codec frames to samples, exact for any split of the frames."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from vllm.config import VllmConfig

from stagevox.contract import NUM_COMPUTED_TOKENS, SAMPLE_RATE, WAVEFORM, OmniOutput, OwnedBatchTensor
from stagevox.errors import CheckpointError, ContractError, MissingStateError
from stagevox.models.vocoder import Vocoder, rounded

from .config import MiniCode2WavConfig
from .layers import Affine, Dense, linear, load_strict, weight

CODES_STATE = "codes"
"""State: LongTensor ``[frames so far, Q]``, silence frames included; row ``p`` is the frame at position ``p``."""


class Block(nn.Module):
    """The parameters of a ConvNeXt block: depthwise causal convolution, norm, MLP, scaled residual."""

    def __init__(self, size: int, kernel: int, inner: int) -> None:
        super().__init__()
        self.dw = Affine(size, 1, kernel)
        self.norm = Affine(size)
        self.fc1 = Dense(size, inner)
        self.fc2 = Dense(inner, size)
        self.scale = weight(size)


class _BlockPlan(NamedTuple):
    size: int
    reach: int
    dw: torch.Tensor
    dw_bias: torch.Tensor
    norm: torch.Tensor
    norm_bias: torch.Tensor
    up: Any
    down: Any

    def __call__(self, x: torch.Tensor, eps: float) -> torch.Tensor:
        """``[B, T, C]`` to ``[B, T - reach, C]``: rows that lack part of their left context are dropped, not padded."""
        y = F.conv2d(x.unsqueeze(1).permute(0, 3, 1, 2), self.dw, self.dw_bias, groups=self.size)
        y = y.permute(0, 2, 3, 1).reshape(-1, self.size)  # channels last all along: nothing is copied
        y = F.layer_norm(y, (self.size,), self.norm, self.norm_bias, eps)
        y = self.down(torch.ops.aten.gelu_.default(self.up(y)))
        return y.view(x.shape[0], -1, self.size).add_(x[:, self.reach :])


def _plan(block: Any) -> _BlockPlan:
    dw = block.dw.weight.data
    scale = block.scale.data
    return _BlockPlan(
        size=dw.shape[0],
        reach=dw.shape[-1] - 1,
        dw=dw.unsqueeze(2).contiguous(memory_format=torch.channels_last),
        dw_bias=block.dw.bias.data,
        norm=block.norm.weight.data,
        norm_bias=block.norm.bias.data,
        up=linear(block.fc1.weight, block.fc1.bias),
        down=linear(block.fc2.weight.data * scale[:, None], block.fc2.bias.data * scale),
    )


class Span(NamedTuple):
    """Frames ``[start, end)`` of a request whose samples are wanted, and its codes by absolute position."""

    start: int
    end: int
    codes: torch.Tensor


class MiniCode2WavNet(nn.Module):
    """The net itself; parameter names are those of the checkpoint.

    Sample ``640 c + i`` depends on frames ``c - 15 .. c`` only: 3 hops of overlap-add and 4 * 6 hops of the upper
    convolutions, at 4 hops a frame, make 7 frames; the lower convolutions add 2 * 4. So it is fed exactly that much
    context, and each layer drops the rows that it has used up. What lies before position 0 is zero at the input of *every* layer.
    """

    code_offsets: torch.Tensor

    def __init__(self, config: MiniCode2WavConfig) -> None:
        super().__init__()
        self.config = config
        size = config.embedding_size
        self.embedding = weight(sum(config.codebook_sizes), size)
        self.pre = nn.ModuleList([Block(size, config.pre_kernel, config.pre_intermediate_size) for _ in range(config.pre_layers)])
        self.up = Dense(size, config.hidden_size * config.upsample)
        size = config.hidden_size
        self.post = nn.ModuleList(
            [Block(size, config.post_kernel, config.post_intermediate_size) for _ in range(config.post_layers)]
        )
        self.norm = Affine(size)
        self.head = Dense(size, config.n_fft + 2)
        offsets = [0, *torch.tensor(config.codebook_sizes).cumsum(0).tolist()[:-1]]
        self.register_buffer("code_offsets", torch.tensor(offsets), persistent=False)
        self.overlap = config.n_fft // config.hop
        self.hop_context = self.overlap - 1 + config.post_layers * (config.post_kernel - 1)
        self.mid_context = -(-self.hop_context // config.upsample)
        self.context = self.mid_context + config.pre_layers * (config.pre_kernel - 1)
        self._plans: tuple[Any, ...] | None = None

    def targets(self, prefix: str) -> dict[str, torch.Tensor]:
        """Where each tensor of a checkpoint goes."""
        targets: dict[str, torch.Tensor] = {
            prefix + name: tensor for name, tensor in self.named_parameters() if name != "embedding"
        }
        for q, table in enumerate(self.embedding.split(self.config.codebook_sizes)):
            targets[f"{prefix}embedding.{q}"] = table
        return targets

    def _make_plans(self) -> tuple[Any, ...]:
        window = torch.hann_window(self.config.n_fft, device=self.embedding.device) / self.config.ola_gain
        return (
            [_plan(block) for block in self.pre],
            linear(self.up.weight, self.up.bias),
            [_plan(block) for block in self.post],
            linear(self.head.weight, self.head.bias),
            window,
        )

    def forward(self, spans: Sequence[Span]) -> list[torch.Tensor]:
        """Samples ``[(end - start) * 640]`` of each span; shorter spans are filled up on the right, where nothing looks."""
        if self._plans is None:
            self._plans = self._make_plans()
        pre, up, post, head, window = self._plans
        config, eps = self.config, self.config.layer_norm_eps
        codes = self._codes(spans)
        batch, length = codes.shape[:2]
        first = min(span.start for span in spans) - self.context
        # 1 where a position exists, 0 before the start; absent if no span sees the start.
        exists = self._exists(spans, length) if first < 0 else None

        x = F.embedding_bag((codes + self.code_offsets).flatten(0, 1), self.embedding, mode="sum").view(batch, length, -1)
        for block in pre:
            x = block(x if exists is None else x * exists[:, -x.shape[1] :], eps)
        x = up(x.view(-1, config.embedding_size)).view(batch, -1, config.hidden_size)
        x = x[:, x.shape[1] - (length - self.context) * config.upsample - self.hop_context :]
        if exists is not None:
            exists = exists.repeat_interleave(config.upsample, 1)
        for block in post:
            x = block(x if exists is None else x * exists[:, -x.shape[1] :], eps)
        hops = x.shape[1]
        x = F.layer_norm(x, (config.hidden_size,), self.norm.weight, self.norm.bias, eps)
        magnitude, phase = head(x.view(-1, config.hidden_size)).float().chunk(2, -1)
        magnitude = magnitude.clamp(max=5.0).sub_(1).exp_()
        y = torch.fft.irfft(torch.complex(magnitude * phase.cos(), magnitude * phase.sin()), n=config.n_fft).mul_(window)
        y = y.view(batch, hops, self.overlap, config.hop)
        if exists is not None:
            y.mul_(exists[:, -hops:, :, None])
        last = self.overlap - 1
        samples = y[:, last:, 0]
        for part in range(1, self.overlap):  # overlap-add: part i of the frame i hops ago
            samples = samples + y[:, last - part : hops - part, part]
        samples = samples.reshape(batch, -1)
        return [row[: (span.end - span.start) * config.samples_per_code] for row, span in zip(samples, spans, strict=True)]

    def _codes(self, spans: Sequence[Span]) -> torch.Tensor:
        """Each span's frames with its left context, ``[B, context + longest span, Q]``."""
        length = self.context + rounded(max(span.end - span.start for span in spans))
        out = torch.zeros(len(spans), length, len(self.config.codebook_sizes), dtype=torch.long)
        for row, span in zip(out, spans, strict=True):
            first = span.start - self.context
            row[max(0, -first) : span.end - first] = span.codes[max(0, first) : span.end]
        return out.to(self.embedding.device)

    def _exists(self, spans: Sequence[Span], length: int) -> torch.Tensor:
        first = torch.tensor([span.start - self.context for span in spans])
        positions = first[:, None] + torch.arange(length)
        return (positions >= 0).to(self.embedding).unsqueeze(-1)


class MiniCode2Wav(Vocoder):
    """Code2Wav under the phase contract: positions are codec frames, each yields its samples once.

    The position axis of a request of T frames is 8 silence frames, the T frames, one silence frame (the bridge adds the
    silence: it warms the causal net up, and the net is one frame late). **Samples of the first 9 positions are dropped, here and
    only here, by absolute position**, so positions ``9 .. T + 8`` yield the T * 640 samples. Samples of a position are the
    same for every split of the axis into spans (to about 1e-6: batch shapes change the order of sums).
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config: MiniCode2WavConfig = vllm_config.model_config.hf_config
        super().__init__(config.hidden_size)
        self.config = config
        self.code2wav = MiniCode2WavNet(self.config)
        delay, rest = divmod(self.config.delay_samples, self.config.samples_per_code)
        if rest or self.config.samples_per_code != self.config.hop * self.config.upsample:
            raise CheckpointError("code2wav", "samples_per_code is not hop * upsample, or does not divide delay_samples")
        if self.config.left_context_codes < self.code2wav.context:
            looks = f"the net looks back {self.code2wav.context} frames"
            raise CheckpointError("code2wav", f"left_context_codes is {self.config.left_context_codes}, {looks}")
        self.skip = self.config.warmup_codes + delay

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load all tensors; raises :class:`stagevox.errors.CheckpointError` on any that is missing, extra or misshapen."""
        load_strict("code2wav", weights, self.code2wav.targets("code2wav."))
        return {name for name, _ in self.named_parameters()}

    def left_context_size(self, num_computed: int) -> int:
        """Frames of context that a span at ``num_computed`` gets to see (EX-9); what it needs is no more than that."""
        return min(self.config.left_context_codes, num_computed)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        *,
        model_intermediate_buffer: Sequence[Mapping[str, Any]] = (),
        request_token_spans: Sequence[tuple[int, int]] = (),
        **kwargs: Any,
    ) -> OmniOutput:
        """Samples of each request's new frames: ``WAVEFORM`` one tensor a request, ``SAMPLE_RATE`` in Hz."""
        waveforms: list[Any] = []
        wanted: list[tuple[int, Span]] = []
        for index, (state, (start, end)) in enumerate(zip(model_intermediate_buffer, request_token_spans, strict=True)):
            span = self._span(state, end - start)
            waveforms.append(_NO_SAMPLES)
            if span.end > span.start:
                wanted.append((index, span))
        if wanted:
            made = self.code2wav([span for _, span in wanted])
            for (index, _), samples in zip(wanted, made, strict=True):
                waveforms[index] = OwnedBatchTensor(samples)
        outputs = {WAVEFORM: waveforms, SAMPLE_RATE: [self.config.sample_rate] * len(waveforms)}
        return OmniOutput(torch.zeros(len(positions), 1, device=positions.device), outputs if waveforms else None)

    def _span(self, state: Mapping[str, Any], count: int) -> Span:
        start = state[NUM_COMPUTED_TOKENS]
        end = start + count
        codes = state.get(CODES_STATE)
        if codes is None:
            raise MissingStateError("forward", f"{CODES_STATE} was never stored")
        if len(codes) < end:
            raise ContractError("forward", f"positions up to {end} are scheduled, {CODES_STATE} has {len(codes)} frames")
        return Span(max(start, self.skip), end, codes)


_NO_SAMPLES = torch.zeros(0)
