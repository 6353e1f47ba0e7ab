"""How many decode steps a stage merges into one round: where the number comes from, and what it may be (MS-1)."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from stagevox.errors import ConfigError

if TYPE_CHECKING:
    from .topology import StageSpec

FIELD = "multi_step_decode_steps"
OPTION = "--multi-step-decode-steps"
ENVIRONMENT = "VLLM_OMNI_MULTI_STEP_STEPS"
MAX_STEPS = 16
ALLOWED = ("0", f"2 to {MAX_STEPS}")


class MultiStepSetting(NamedTuple):
    """A stage's number of steps and who said it."""

    steps: int
    """0: off."""
    source: str
    """``cli``, ``environment``, ``stage`` or ``default``."""

    @property
    def is_blanket(self) -> bool:
        """True if it was said for all stages at once: one that can't merge steps is not meant."""
        return self.source in ("cli", "environment")


def check_multi_step_steps(field: str, value: Any) -> int:
    """``value`` as a number of steps.

    Raises:
        ConfigError: negative, not an integer, 1, or above :data:`MAX_STEPS`; ``field`` is the caller's name for it.
    """
    try:
        steps = operator.index(value)
    except TypeError:
        raise ConfigError(field, f"not an integer: {value!r}", ALLOWED) from None
    if isinstance(value, bool):
        raise ConfigError(field, f"not an integer: {value!r}", ALLOWED)
    if steps != 0 and not 2 <= steps <= MAX_STEPS:
        raise ConfigError(field, f"out of range: {value!r}", ALLOWED)
    return steps


def parse_multi_step_steps(field: str, text: str) -> int:
    """The same from a command line or an environment variable."""
    try:
        value = int(text)
    except ValueError:
        raise ConfigError(field, f"not an integer: {text!r}", ALLOWED) from None
    return check_multi_step_steps(field, value)


def resolve_multi_step_steps(spec: StageSpec, environ: Mapping[str, str] | None = None) -> MultiStepSetting:
    """A stage's setting: command line over environment over the stage's own over 0.

    None stands for unset, and so does an empty environment variable. All that is set is checked, also what is overruled.

    Raises:
        ConfigError: a value that :func:`check_multi_step_steps` refuses.
    """
    blanket, own = spec.multi_step_for_all, spec.engine_extras.get(FIELD)
    text = (os.environ if environ is None else environ).get(ENVIRONMENT, "").strip()
    given = {
        "cli": None if blanket is None else check_multi_step_steps(FIELD, blanket),
        "environment": parse_multi_step_steps(ENVIRONMENT, text) if text else None,
        "stage": None if own is None else check_multi_step_steps(f"{spec.name}.{FIELD}", own),
    }
    for source, steps in given.items():
        if steps is not None:
            return MultiStepSetting(steps, source)
    return MultiStepSetting(0, "default")
