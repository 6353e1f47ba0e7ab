"""The border for sampling parameters: what a client may set, checked before any stage sees it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from stagevox.errors import BadParameterError, UnknownStageError

SPOKEN_BY = "talker"
"""The stage that parameters without a stage name are for, if the model has it; else its first stage."""


def _number(low: float, high: float = math.inf, *, above: bool = False) -> Callable[[str, Any], float]:
    """A finite number in ``[low, high]``, or in ``(low, high]`` with ``above``; NumPy's are numbers too."""
    bound = f"above {low:g}" if above else f"at least {low:g}"
    allowed = bound if high == math.inf else f"{bound}, at most {high:g}"

    def check(field: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise BadParameterError(field, f"not a number: {value!r}")
        try:
            number = float(value)
        except OverflowError:  # an integer of hundreds of digits
            raise BadParameterError(field, "out of range", [allowed]) from None
        if not math.isfinite(number):
            raise BadParameterError(field, f"not a finite number: {value!r}")
        if number < low or number > high or (above and number == low):
            raise BadParameterError(field, f"out of range: {value!r}", [allowed])
        return number

    return check


def _integer(low: int, high: int) -> Callable[[str, Any], int]:
    """An integer in ``[low, high]``; NumPy's are integers too."""

    def check(field: str, value: Any) -> int:
        try:
            number = operator.index(value)
        except TypeError:
            raise BadParameterError(field, f"not an integer: {value!r}") from None
        if isinstance(value, bool):
            raise BadParameterError(field, f"not an integer: {value!r}")
        if not low <= number <= high:
            raise BadParameterError(field, f"out of range: {value!r}", [f"{low} to {high}"])
        return number

    return check


_POSITIONS = 2**31 - 1

FIELDS: Mapping[str, Callable[[str, Any], int | float]] = {
    "frequency_penalty": _number(-2, 2),
    "max_tokens": _integer(1, _POSITIONS),
    "min_p": _number(0, 1),
    "min_tokens": _integer(0, _POSITIONS),
    "presence_penalty": _number(-2, 2),
    "repetition_penalty": _number(0.01, 100),
    "seed": _integer(0, 2**63 - 1),
    "temperature": _number(0, 2),
    "top_k": _integer(0, _POSITIONS),
    "top_p": _number(0, 1, above=True),
}
"""The fields of vLLM's ``SamplingParams`` that a client may set, with their checks. ``top_k`` 0 means all.

vLLM takes temperatures up to 2 and any penalty above 0; in float32 extreme penalties make logits that are no numbers.
"""


def check_sampling(params: Mapping[str, Any] | None, stages: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Check ``params`` and sort them by stage.

    Each key is a field, for the Talker, or a stage's name with a mapping of fields. Values of None are left out.

    Raises:
        BadParameterError: an unknown field, or a value that it can't have; ``field`` is the field's name.
        UnknownStageError: a mapping under a name that is no stage's.
    """
    if params is None:
        return {}
    if not isinstance(params, Mapping):
        raise BadParameterError("sampling_params", f"not a mapping but a {type(params).__name__}")
    speaker = SPOKEN_BY if SPOKEN_BY in stages else stages[0]
    checked: dict[str, dict[str, Any]] = {}
    for key, value in params.items():
        if key in stages:
            if not isinstance(value, Mapping):
                raise BadParameterError(key, f"not a mapping but a {type(value).__name__}")
            for field, one in value.items():
                _check_field(checked.setdefault(key, {}), f"{key}.{field}", field, one)
        elif isinstance(value, Mapping) and key not in FIELDS:
            raise UnknownStageError(str(key), "no such stage", stages)
        else:
            _check_field(checked.setdefault(speaker, {}), str(key), key, value)
    for stage, fields in checked.items():
        if fields.get("min_tokens", 0) > fields.get("max_tokens", _POSITIONS):
            name = "min_tokens" if stage == speaker else f"{stage}.min_tokens"
            raise BadParameterError(name, f"more than max_tokens: {fields['min_tokens']} > {fields['max_tokens']}")
    return checked


def _check_field(checked: dict[str, Any], name: str, field: str, value: Any) -> None:
    check = FIELDS.get(field)
    if check is None:
        raise BadParameterError(name, "no such sampling parameter", sorted(FIELDS))
    if value is not None:
        checked[field] = check(name, value)
