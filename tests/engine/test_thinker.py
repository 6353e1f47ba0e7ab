"""The shipped Thinker on vLLM's stock Llama, in process."""

from __future__ import annotations

import collections
import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")

vllm = pytest.importorskip("vllm")

from stagevox.models.mini.text import ThinkerTokenizer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # what vLLM and torch warn of while an engine starts is theirs

DATA = Path(__file__).parents[1] / "data"
WEIGHTS = str(files("stagevox.models.mini") / "weights" / "thinker")
TOKENIZER = ThinkerTokenizer()

READINGS = {
    "12 + 30 = 42": "twelve plus thirty equals forty two",
    "7:30": "seven thirty",
    "See you on 4 July!": "see you on july four",
    "Hello, good morning.": "hello good morning",
    "the 21st of March": "march twenty one",
    "July 04, 2024": "july four twenty twenty four",
    "5 x -3 = ?": "five times minus three equals what",
    "What's 60 - 18?": "what is sixty minus eighteen",
    "It's 07:05": "it is seven zero five",
    "Open the 3rd door": "open the three door",
    "7:00-8:15": "seven to eight fifteen",
    "My number is 5551234": "my number is five five five one two three four",
    "0": "zero",
    "no no no no no no no no": "no no no no no no no no",
}


@pytest.fixture(scope="module")
def engine() -> Any:
    return vllm.LLM(
        model=WEIGHTS, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=256,
        kv_cache_memory_bytes=64 << 20, block_size=32, gpu_memory_utilization=0.05, max_num_seqs=64,
    )  # fmt: skip


def read(engine: Any, texts: list[str]) -> list[list[int]]:
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=80, stop_token_ids=[TOKENIZER.eos_id], detokenize=False)
    prompts = [{"prompt_token_ids": TOKENIZER.encode(text)} for text in texts]
    return [list(o.outputs[0].token_ids) for o in engine.generate(prompts, sampling, use_tqdm=False)]


def held_out() -> list[dict[str, str]]:
    return [json.loads(line) for line in (DATA / "thinker_heldout.jsonl").read_text(encoding="utf-8").splitlines()]


def test_held_out_texts(engine: Any) -> None:
    rows = held_out()
    got = [TOKENIZER.decode(ids) for ids in read(engine, [row["text"] for row in rows])]
    wrong = [(row["category"], row["text"], said) for row, said in zip(rows, got, strict=True) if said != row["spoken"]]
    assert len(wrong) <= 0.01 * len(rows), wrong
    assert max(collections.Counter(c for c, _, _ in wrong).values(), default=0) <= 3, wrong


def test_the_prompts_of_the_voice_pass_unchanged(engine: Any) -> None:
    texts = [p["text"] for p in json.loads((DATA / "voice_prompts.json").read_text())["prompts"]]
    assert [TOKENIZER.decode(ids) for ids in read(engine, texts)] == texts


def test_readings(engine: Any) -> None:
    assert dict(zip(READINGS, map(TOKENIZER.decode, read(engine, list(READINGS))), strict=True)) == READINGS


def test_same_tokens_as_transformers(engine: Any) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    texts = [row["text"] for row in held_out()[::20]]
    assert len(texts) == 30
    oracle = transformers.AutoModelForCausalLM.from_pretrained(WEIGHTS, dtype=torch.float32)
    for text, ids in zip(texts, read(engine, texts), strict=True):
        prompt = torch.tensor([TOKENIZER.encode(text)])
        expected = oracle.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=80)
        assert expected[0, prompt.shape[1] :].tolist() == ids
