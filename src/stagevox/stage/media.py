"""Images, sounds and videos of a prompt, through vLLM's own processor for the model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor

from stagevox.errors import BadMediaError, BadRequestError

from .vllm_config import first_reason

_NUMBERS = re.compile(r"\[[\[\]\d\s.,e+-]{24,}\]")
"""A printed array; a shape is shorter."""

REASON_LENGTH = 200
"""Characters of what a processor says."""


class MediaReader:
    """Turns placeholders and media into token ids and features. The processor is loaded with the first prompt that has media."""

    def __init__(self, stage: str, config: VllmConfig) -> None:
        self._stage = stage
        self._config = config
        self._made: InputProcessor | None = None

    def read(
        self, prompt_token_ids: list[int], media: Mapping[str, Any], options: Mapping[str, Any]
    ) -> tuple[list[int], list[MultiModalFeatureSpec]]:
        """Expand the placeholders of a prompt: ``(token ids, features)``.

        ``media`` is vLLM's ``multi_modal_data``, ``options`` its ``mm_processor_kwargs``.

        Raises:
            BadMediaError: the processor can't make sense of the media; the field names their kinds.
        """
        field = ", ".join(sorted(media))
        if not self._config.model_config.supports_multimodal_inputs:
            raise BadMediaError(field, f"stage {self._stage} takes text only")
        prompt: Any = {"prompt_token_ids": prompt_token_ids, "multi_modal_data": {**media, **_pictures(media)}}
        if options:
            prompt["mm_processor_kwargs"] = dict(options)
        try:
            made = self._processor.process_inputs("media", prompt, SamplingParams(max_tokens=1), ("generate",))
        except BadRequestError:
            raise
        except Exception as error:  # whatever a processor trips over, the media are to blame
            raise BadMediaError(field, f"can't be read: {_reason(error)}") from error
        assert made.prompt_token_ids is not None
        return list(made.prompt_token_ids), list(made.mm_features or ())

    @property
    def _processor(self) -> InputProcessor:
        if self._made is None:
            self._made = InputProcessor(self._config)
        return self._made


def _pictures(media: Mapping[str, Any]) -> dict[str, Any]:
    """Pixels ``[height, width, 3]`` as pictures: of an array, processors take a height of 1 or 3 for the number of channels."""
    from PIL import Image

    if "image" not in media:
        return {}
    return {"image": [Image.fromarray(one) if isinstance(one, np.ndarray) else one for one in media["image"]]}


def _reason(error: BaseException) -> str:
    """What a processor tripped over first: what it raised after that repeats its whole input, numbers and all."""
    while error.__cause__ is not None:
        error = error.__cause__
    said = first_reason(error) if isinstance(error, Exception) else str(error)
    said = _NUMBERS.sub("[...]", said)
    return f"{type(error).__name__}: {said[:REASON_LENGTH]}"
