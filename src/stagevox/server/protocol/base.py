"""What all request models share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_KEYS = 256
"""Of one JSON object. Pydantic keeps an error for each that is wrong, which takes far more memory than the body did."""


def few_keys(data: Any) -> Any:
    """Refuse an object of more than ``MAX_KEYS`` before each of them is looked at."""
    if isinstance(data, dict) and len(data) > MAX_KEYS:
        counts = {"count": len(data), "most": MAX_KEYS}
        raise PydanticCustomError("too_many_fields", "{count} fields; at most {most} are allowed", counts)
    return data


Number = Annotated[float, Field(allow_inf_nan=False)]
StageParams = Annotated[
    dict[str, dict[str, Any]],
    BeforeValidator(few_keys),
    Field(description="Sampling parameters by stage, laid over the request's own.", examples=[{"talker": {"temperature": 0.7}}]),
]


class RequestModel(BaseModel):
    """A request body: values as JSON types them, and no field that isn't known."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _is_sound(cls, data: Any) -> Any:
        """JSON can hold halves of characters, which no text has; and more fields than anybody means."""
        few_keys(data)
        for field, value in data.items() if isinstance(data, dict) else ():
            for text in value if isinstance(value, list) else (value,):
                if isinstance(text, str) and not _is_unicode(text):
                    raise PydanticCustomError("not_unicode", "holds half of a surrogate pair", {"field": field})
        return data


class ResponseModel(BaseModel):
    """A response body."""

    def json_bytes(self) -> bytes:
        """What goes over the wire: the fields that were set."""
        return self.model_dump_json(exclude_unset=True).encode()


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
