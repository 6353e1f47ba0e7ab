"""A request's sampling parameters, each for its stage, with the client's names for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stagevox.config.sampling import check_sampling
from stagevox.errors import BadParameterError, BadRequestError

from .errors import as_api_error
from .state import ServerState

PREFIX = "stage_params"


def by_stage(
    state: ServerState,
    stage_params: Mapping[str, Mapping[str, Any]] | None,
    stage: str | None = None,
    standard: Mapping[str, tuple[str, Any]] | None = None,
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """``(fields by stage, client's names)``: ``standard`` maps the client's names to ``(field, value)`` for ``stage``, and
    ``stage_params`` are laid over them.

    Raises:
        ApiError: 400, a stage, a field or a value that can't be.
    """
    stages = state.blueprint.stages
    names = {each: f"{PREFIX}.{each}" for each in stages}
    sampling: dict[str, dict[str, Any]] = {}
    if stage is not None:
        for name, (field, value) in (standard or {}).items():
            if value is not None:
                sampling.setdefault(stage, {})[field] = value
                names[f"{stage}.{field}"] = name
                names[field] = name
    try:
        for each, fields in (stage_params or {}).items():
            if each not in stages:
                raise BadParameterError(f"{PREFIX}.{each}", "no such stage", stages)
            for field, value in fields.items():
                if value is not None:
                    sampling.setdefault(each, {})[field] = value
                    names.pop(f"{each}.{field}", None)
        check_sampling(sampling, stages)
    except BadRequestError as error:
        raise as_api_error(error, names) from error
    return sampling, names
