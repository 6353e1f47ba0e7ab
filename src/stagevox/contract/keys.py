"""The names under which tensors travel. No torch here: a server process that only passes them on knows the names too."""

from __future__ import annotations

CODES = "codes.audio"
"""Key of the codec frames ``[frames, Q]`` in ``multimodal_outputs``."""

WAVEFORM = "audio.waveform"
"""Key of the samples ``[samples]`` that a generation stage returns for a request's new frames."""

HIDDEN = "hidden"
"""Key of exported hidden rows ``[n, H]``. What stands under this name, or a name ``hidden.*``, crosses to the next stage and
never reaches a client."""

MROPE_POSITIONS = "mrope_positions"
"""State: ``(positions [3, prompt length], delta)`` of a request's prompt, for a model with M-RoPE whose stage has no media to take
them from; a generated position p has the three axes at ``p + delta``."""

SAMPLE_RATE = "audio.sample_rate"
"""Key of the sample rate in Hz that goes with :data:`WAVEFORM`."""
