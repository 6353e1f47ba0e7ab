"""What crosses from the talker to Code2Wav."""

from __future__ import annotations

from pathlib import Path

from stagevox.models.checkpoint import read_json, require
from stagevox.models.windows import WindowedInput


class Code2WavInput(WindowedInput):
    """Chunks of frames as positions of Code2Wav, decoded in the reference's windows by default."""

    def __init__(self, checkpoint: Path, *, window_frames: int = 300, left_context: int = 25) -> None:
        path = checkpoint / "config.json"
        config = read_json(path)
        size = int(require(path, config, "decoder_config", "codebook_size"))
        groups = int(require(path, config, "decoder_config", "num_quantizers"))
        super().__init__(groups, size, (window_frames, left_context))
