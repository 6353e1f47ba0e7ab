"""Where a model's code is called from the runner: whatever goes wrong on the other side comes back under the hook's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from stagevox.errors import ContractError, HookRaisedError, HookShapeError


def call_hook(name: str, hook: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a model's hook; whatever it raises comes out as a :class:`ContractError` under the hook's name."""
    try:
        return hook(*args, **kwargs)
    except ContractError:
        raise
    except Exception as error:
        raise HookRaisedError(name, f"{type(error).__name__}: {error}") from error


@contextmanager
def copying(hook: str) -> Iterator[None]:
    """What can't be copied into the runner's buffers, such as a tensor without storage, is the hook's fault."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        raise HookShapeError(hook, f"returned what can't be copied: {error}") from error
