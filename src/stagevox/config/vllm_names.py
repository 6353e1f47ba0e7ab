"""What only vLLM knows, asked in this process: importing it takes seconds, so the first call is made only when something depends on it."""

from __future__ import annotations

from typing import Any

from .env import prepare_inline_process


def engine_arg_names() -> frozenset[str]:
    """The engine arguments that an operator may set."""
    _prepare()
    from stagevox.stage.engine_args import engine_arg_names as names

    return names()


def check_engine_arg(field: str, key: str, value: Any) -> Any:
    """An engine argument's value, coerced; raises :class:`stagevox.errors.ConfigError` about ``field``."""
    _prepare()
    from stagevox.stage.engine_args import coerce_engine_arg

    return coerce_engine_arg(field, key, value)


def running_platform() -> str:
    """``cpu``, ``cuda``, ``rocm``, ``xpu`` or ``tpu``; or what vLLM calls another one."""
    _prepare()
    from stagevox.stage.platform import running_platform as running

    return running()


def _prepare() -> None:
    from stagevox.stage.version import check_vllm_version

    check_vllm_version()
    prepare_inline_process()
