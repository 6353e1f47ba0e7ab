"""A conversation as the token ids of a published chat template."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stagevox.config.topology import whole_text
from stagevox.errors import BadParameterError, CheckpointError, EmptyTextError, VocabularyError

from ..checkpoint import read_json

ROLES = ("system", "user", "assistant")
PARTS = ("text", "image", "audio", "video")


class ChatTokenizer:
    """The tokenizer of a checkpoint folder and its chat template."""

    def __init__(self, folder: Path, specials: Sequence[str] = ()) -> None:
        """``specials`` are tokens that the vocabulary must have.

        Raises:
            CheckpointError: names the file, and the token that is missing.
        """
        from transformers import AutoTokenizer

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError("model", f"{path} is missing")
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # whatever a damaged file makes the library trip over
            reason = " ".join(str(error).split())
            raise CheckpointError("model", f"{folder}: the tokenizer can't be read: {type(error).__name__}: {reason}") from error
        vocabulary = self._tokenizer.get_vocab()
        for token in specials:
            if token not in vocabulary:
                raise CheckpointError("model", f"{path} lacks the token {token}")
        self._specials = tuple(str(token) for token in self._tokenizer.get_added_vocab())
        self._template = self._read_template(folder)

    def _read_template(self, folder: Path) -> str:
        for name in ("chat_template.jinja", "chat_template.json"):
            path = folder / name
            if path.is_file():
                template = path.read_text(encoding="utf-8") if path.suffix == ".jinja" else read_json(path).get("chat_template")
                if not isinstance(template, str):
                    raise CheckpointError("model", f"{path} lacks chat_template")
                return template
        template = self._tokenizer.chat_template
        if not isinstance(template, str):
            raise CheckpointError("model", f"{folder} holds no chat template")
        return template

    def id_of(self, token: str) -> int:
        """The id of a token of the vocabulary."""
        number: int = self._tokenizer.convert_tokens_to_ids(token)
        return number

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of checked messages, with the assistant's turn begun."""
        text = self._tokenizer.apply_chat_template(
            list(messages), chat_template=self._template, tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a reply, without special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def check(self, field: str, text: Any) -> str:
        """A caller's text; raises :class:`BadParameterError` if it is none, :class:`VocabularyError` if it has a special token."""
        whole = whole_text(field, text)
        for token in self._specials:
            if token in whole:
                raise VocabularyError(field, f"holds the special token {token}")
        return whole

    def messages(self, field: str, given: Any, media: Mapping[str, int]) -> list[dict[str, Any]]:
        """A caller's conversation, checked: roles, parts, and as many places for media as there are media.

        Raises:
            BadRequestError: the field names the message or the part.
        """
        if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
            raise BadParameterError(field, f"not a sequence of messages but a {type(given).__name__}")
        checked = [self._message(f"{field}[{index}]", message) for index, message in enumerate(given)]
        if not checked:
            raise EmptyTextError(field, "no messages")
        places = [part["type"] for message in checked for part in message["content"]]
        for kind in PARTS[1:]:
            if places.count(kind) != media.get(kind, 0):
                raise BadParameterError(field, f"{places.count(kind)} places for {kind}, {media.get(kind, 0)} given")
        return checked

    def _message(self, field: str, message: Any) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise BadParameterError(field, f"not a mapping but a {type(message).__name__}")
        role = message.get("role")
        if role not in ROLES:
            raise BadParameterError(f"{field}.role", f"no role {role!r}", ROLES)
        return {"role": role, "content": list(self._parts(f"{field}.content", message.get("content")))}

    def _parts(self, field: str, content: Any) -> Iterator[dict[str, str]]:
        if isinstance(content, str):
            yield {"type": "text", "text": self.check(field, content)}
            return
        if isinstance(content, bytes | Mapping) or not isinstance(content, Sequence):
            raise BadParameterError(field, f"neither a text nor a sequence of parts but a {type(content).__name__}")
        for index, part in enumerate(content):
            at = f"{field}[{index}]"
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind not in PARTS:
                raise BadParameterError(f"{at}.type", f"no part {kind!r}", PARTS)
            yield {"type": "text", "text": self.check(f"{at}.text", part.get("text"))} if kind == "text" else {"type": kind}
