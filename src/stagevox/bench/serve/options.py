"""What one benchmark is told to do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Options:
    """Checked; times in seconds."""

    base_url: str
    """Ends with a slash; ``v1/...`` is added to it."""
    endpoint: str = "speech"
    """``speech`` or ``chat``."""
    modalities: tuple[str, ...] = ("text", "audio")
    """Of chat."""
    prompts: tuple[str, ...] = ()
    prompts_from: str = "built in"
    num_prompts: int = 16
    request_rate: float = math.inf
    burstiness: float = 1.0
    concurrency: tuple[int | None, ...] = (None,)
    """Requests in flight at most, one run each; None: no limit."""
    repeats: int = 1
    warmups: int = 2
    audio_format: str = "wav"
    """``wav``, which names its own rate, or ``pcm``."""
    voice: str | None = None
    model: str | None = None
    seed: int = 0
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = None
    timeout: float = 120.0
    ready_timeout: float = 0.0
    percentiles: tuple[float, ...] = (50, 90, 99)
    save_wavs: Path | None = None
    result: Path | None = None
    save_detailed: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)
    progress: bool = True

    @property
    def spoken(self) -> bool:
        """True if answers must hold speech."""
        return self.endpoint == "speech" or "audio" in self.modalities

    def named(self) -> dict[str, Any]:
        """The fields of every request that were given."""
        return {name: value for name, value in (("model", self.model), ("voice", self.voice)) if value is not None}
