"""What only vLLM knows, asked in this process: importing it takes seconds, so the first call is made only when something depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .env import prepare_inline_process


def engine_arg_names() -> frozenset[str]:
    """The engine arguments that an operator may set."""
    _prepare()
    from stagevox.stage.engine_args import engine_arg_names as names

    return names()


def check_engine_args(stage: str, arguments: Mapping[str, Any]) -> None:
    """Check engine arguments that were set in code; raises :class:`stagevox.errors.ConfigError`."""
    _prepare()
    from stagevox.stage.engine_args import check_engine_args as check

    check(stage, arguments)


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
