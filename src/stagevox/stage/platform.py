"""The kind of machine that vLLM sees."""

from __future__ import annotations

from vllm.platforms import current_platform


def running_platform() -> str:
    """``cpu``, ``cuda``, ``rocm``, ``xpu`` or ``tpu``; ``unspecified`` without any, or the name of a plugin's own."""
    for name in ("cpu", "cuda", "rocm", "xpu", "tpu"):
        if getattr(current_platform, f"is_{name}")():
            return name
    return str(current_platform.device_name or "unspecified")
