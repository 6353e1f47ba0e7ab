"""A tiny byte-level BPE tokenizer in the layout of Qwen's: the same special tokens in the same order, after a small base vocabulary."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

BASE = 640
"""Base vocabulary: the first special token has this id."""

REAL_BASE = 151643
"""Where the special tokens begin in the published vocabularies."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CORPUS = (
    "system user assistant You are Qwen , a virtual human developed by the Qwen Team , Alibaba Group , capable of perceiving"
    " auditory and visual inputs , as well as generating text and speech . hello world this is a tiny test of the omni stage"
    " runtime the quick brown fox jumps over the lazy dog speak slowly please what do you see hear in the picture sound"
)


def special_id(real: int) -> int:
    """The id here of the special token that the published vocabulary has at ``real``."""
    return real - REAL_BASE + BASE


def learn_merges(words: Sequence[str], count: int) -> list[tuple[str, str]]:
    """The first ``count`` byte-pair merges of a list of words; ties go to the pair that sorts first."""
    pieces = {word: list(word) for word in words}
    weight = Counter(words)
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, parts in pieces.items():
            for pair in pairwise(parts):
                pairs[pair] += weight[word]
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for parts in pieces.values():
            at = 0
            while at < len(parts) - 1:
                if (parts[at], parts[at + 1]) == best:
                    parts[at : at + 2] = ["".join(best)]
                at += 1
    return merges


def write_tokenizer(folder: Path, specials: Sequence[str], extra: Mapping[str, Any] | None = None) -> PreTrainedTokenizerFast:
    """Write ``tokenizer.json``, ``tokenizer_config.json``, ``vocab.json`` and ``merges.txt``; return the tokenizer.

    ``specials`` get the ids from :data:`BASE` on; ``extra`` are further fields of the tokenizer's config, such as ``image_token``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = CORPUS.split()
    spaced = [word for word in words for word in (word, "\u0120" + word)]
    merges = learn_merges(spaced, BASE - len(alphabet))
    vocab = {piece: index for index, piece in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    while len(vocab) < BASE:
        vocab[f"\u0120unused{len(vocab)}"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    assert tokenizer.token_to_id(specials[0]) == BASE, "a special token is in the base vocabulary"
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", **(extra or {}))
    fast.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config |= {"tokenizer_class": "Qwen2Tokenizer", "chat_template": CHAT_TEMPLATE, "extra_special_tokens": dict(extra or {})}
    path.write_text(json.dumps(config, indent=1), encoding="utf-8")
    (folder / "vocab.json").write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return fast
