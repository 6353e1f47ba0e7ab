"""Code2Wav: the 12 Hz decoder as a generation stage, window by window as the reference decodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence
from vllm.config import VllmConfig

from stagevox.errors import CheckpointError
from stagevox.models.windows import Piece, WindowedVocoder

from .decoder import SpeechDecoder
from .layout import ENCODING


class Qwen3TTSCode2Wav(WindowedVocoder):
    """The reference's chunked decoding of a request's frames: T frames make ``1920 * T`` samples."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = vllm_config.model_config.hf_config
        super().__init__(config.hidden_size, config.decoder_config.num_quantizers, config.output_sample_rate)
        self.decoder = SpeechDecoder(config.decoder_config)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the decoder's tensors; raises :class:`CheckpointError` on any that is missing, extra or misshapen."""
        targets = dict(self.named_parameters())
        loaded: set[str] = set()
        with torch.no_grad():
            for name, tensor in weights:
                if name.startswith(ENCODING):
                    continue
                if name not in targets or targets[name].shape != tensor.shape:
                    raise CheckpointError(
                        "code2wav", f"tensor {name} with shape {list(tensor.shape)} belongs to no part of the model"
                    )
                targets[name].copy_(tensor)
                loaded.add(name)
        if missing := sorted(set(targets) - loaded):
            raise CheckpointError("code2wav", f"missing tensors: {', '.join(missing)}")
        return loaded

    def decode(self, pieces: Sequence[Piece], codes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Samples of each piece; shorter ones are filled up on the right, where the decoder doesn't look."""
        device = self.decoder.pre_conv.conv.weight.device
        latents = self.decoder.latents(pad_sequence(list(codes), batch_first=True).to(device).transpose(1, 2))
        # The convolutions get what they can see of the frames before the piece, counted from the window's first one.
        begins = [max(0, piece.start - piece.first - self.decoder.reach) for piece in pieces]
        seen = [row[begin : len(each)] for row, begin, each in zip(latents, begins, codes, strict=True)]
        samples = self.decoder.samples(pad_sequence(seen, batch_first=True))
        rate = self.decoder.samples_per_frame
        return [
            row[(piece.start - piece.first - begin) * rate : (piece.end - piece.first - begin) * rate]
            for row, piece, begin in zip(samples, pieces, begins, strict=True)
        ]
