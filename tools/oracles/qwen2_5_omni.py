"""The reference of Qwen2.5-Omni: stock ``transformers`` 4.57.3 on the tiny checkpoint, float32, greedy, one request at a time.

``qwen2_5_omni.py CHECKPOINT OUT DIGEST`` writes ``golden.json`` and ``waveforms.safetensors``. Text ids and codes are those of the
reference's own ``generate``, looked at through spies that change nothing. The waveform is the reference's ``token2wav`` over all
codes before the end, started from the noise that stagevox defines (:mod:`stagevox.models.qwen2_5_omni.noise`): noise is an input
there, drawn from a global generator.

Faults of this reference (each is checked here as it is recorded):

- ``generate`` drops the last code before it makes the waveform: right when that is an end, one frame short when it is not.
- A reply of one token has no row: ``torch.cat`` of nothing raises.
- A Talker that ends at once leaves no code: ``token2wav`` raises on an empty sequence.
- The row of a reply's last token is never computed, so a Thinker that is cut by its length speaks one token less than it says.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoProcessor, Qwen2_5OmniForConditionalGeneration

from stagevox.models.qwen2_5_omni.noise import noise

SYSTEM = (
    "You are Qwen, a virtual human developed by the Qwen Team, Alibaba Group, capable of perceiving auditory and visual inputs,"
    " as well as generating text and speech."
)
LIMIT = 1e-3
"""The smallest margin between the best and the second-best id that any decision of a golden case may have."""

CODEC_END = 8292
"""Ids from here on end the codes or are never chosen."""

TEXT, CODES = 60, 150
"""Limits of a case that names none."""

CASES: dict[str, dict[str, Any]] = {
    "steady": {"text": "jumps hear quick stage the hear the quick speak runtime", "voice": "Ethan"},
    "other_voice": {
        "text": "the of jumps hear hello this lazy slowly please jumps fox a test you of lazy stage",
        "voice": "Chelsie",
    },
    "past_the_reply": {"text": "stage over dog what stage jumps of is please hear test jumps do", "voice": "Ethan"},
    "wordy": {"text": "test picture runtime brown picture you is omni do is", "voice": "Chelsie"},
    "short": {"text": "you fox", "voice": "Ethan"},
    "bare": {"text": "hello world", "voice": "Ethan", "system": False},
    "image": {"text": "you the sound picture the sound hear", "voice": "Chelsie", "media": ["image"]},
    "audio": {"text": "the world a sound picture see do", "voice": "Chelsie", "media": ["audio"]},
    "image_and_audio": {"text": "please speak of this picture", "voice": "Ethan", "media": ["image", "audio"]},
    "video": {"text": "what do you see", "voice": "Chelsie", "media": ["video"]},
    "two_tokens": {"text": "what hear is world", "voice": "Chelsie"},
    "one_token": {"text": "a of sound you stage speak omni picture you this", "voice": "Chelsie"},
    "one_frame": {"text": "omni do is a test please is sound quick this tiny", "voice": "Ethan"},
    "no_frame": {
        "text": "dog sound slowly runtime the do of tiny tiny speak dog lazy speak do tiny this what over please you",
        "voice": "Ethan",
    },
    "text_cut_at_6": {"text": "stage over dog what stage jumps of is please hear test jumps do", "voice": "Ethan", "max_text": 6},
    "text_cut_at_7": {"text": "stage over dog what stage jumps of is please hear test jumps do", "voice": "Ethan", "max_text": 7},
    "text_cut_at_1": {"text": "stage over dog what stage jumps of is please hear test jumps do", "voice": "Ethan", "max_text": 1},
    "text_cut_at_2": {"text": "stage over dog what stage jumps of is please hear test jumps do", "voice": "Ethan", "max_text": 2},
    "codes_cut_at_20": {"text": "jumps hear quick stage the hear the quick speak runtime", "voice": "Ethan", "max_codes": 20},
}
"""``media`` stand before the text, in this order; ``system`` False leaves the system prompt out."""

ROWS = ("steady", "image", "audio")
"""Cases whose Talker rows are kept, to be compared one by one."""

WHOLE = ("steady", "two_tokens", "one_frame")
"""Cases whose waveform is kept whole; of the others every eighth sample."""

CHUNK, CONTEXT, AHEAD = 12, 24, 12
"""Frames of a chunk, before it and after it, in the chunked run: multiples of the vocoder's attention blocks of 12."""

SEED = 42
"""Of the noise."""


def picture(shift: int = 0) -> np.ndarray:
    """Three ramps, ``[56, 84, 3]``."""
    rows, columns = np.arange(56), np.arange(84)
    planes = [np.add.outer(rows, columns), np.add.outer(3 * rows, columns), np.add.outer(rows, 2 * columns)]
    return np.stack([(plane + shift) % 256 for plane in planes], -1).astype(np.uint8)


def tone() -> np.ndarray:
    """A second and a bit of two tones at 16 kHz."""
    time = np.arange(20000) / 16000
    return (0.5 * np.sin(2 * np.pi * 440 * time) + 0.2 * np.sin(2 * np.pi * 1234 * time)).astype(np.float32)


def clip() -> np.ndarray:
    """Four pictures, ``[4, 56, 84, 3]``."""
    return np.stack([picture(40 * index) for index in range(4)])


MEDIA = {"image": ("images", picture), "audio": ("audio", tone), "video": ("videos", clip)}


def margin(scores: tuple[torch.Tensor, ...]) -> float:
    """The smallest distance between the two best ids of any step, as they were chosen from."""
    best = torch.stack([step[0].topk(2).values for step in scores])
    return float((best[:, 0] - best[:, 1]).min())


class Reference:
    """The model, with spies on what its stages were given and gave."""

    def __init__(self, checkpoint: Path) -> None:
        self.processor = AutoProcessor.from_pretrained(checkpoint, use_fast=False)
        load = Qwen2_5OmniForConditionalGeneration.from_pretrained
        self.model = load(checkpoint, dtype=torch.float32).eval()
        # The generation config of the sub-models is not read from disk: what ends a text must be passed.
        self.ends = json.loads((checkpoint / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
        self.seen: dict[str, Any] = {}
        self._spy("thinker", output_scores=True)
        self._spy("talker", output_scores=True, return_dict_in_generate=True)
        self._spy_on_waves()
        self._spy_on_positions()

    def _spy(self, stage: str, **more: Any) -> None:
        module = getattr(self.model, stage)
        inner = module.generate

        def generate(**given: Any) -> Any:
            self.seen[f"{stage}_given"] = {
                key: value.clone() if torch.is_tensor(value) else value for key, value in given.items()
            }
            result = self.seen[stage] = inner(**given, **more)
            return result if stage == "thinker" else result.sequences

        module.generate = generate

    def _spy_on_waves(self) -> None:
        self.vocode = self.model.token2wav.forward

        def forward(codes: torch.Tensor, **given: Any) -> torch.Tensor:
            self.seen["dropped_last"] = codes[0].tolist()
            return torch.zeros(1)

        self.model.token2wav.forward = forward

    def _spy_on_positions(self) -> None:
        inner = self.model.talker.get_rope_index

        def get_rope_index(*given: Any) -> Any:
            self.seen["positions"] = inner(*given)
            return self.seen["positions"]

        self.model.talker.get_rope_index = get_rope_index

    def run(self, case: dict[str, Any]) -> str | None:
        """One request through ``generate``; the error, if it raised one, once the Thinker had answered."""
        media = case.get("media", [])
        content = [{"type": kind} for kind in media] + [{"type": "text", "text": case["text"]}]
        messages = [{"role": "system", "content": [{"type": "text", "text": SYSTEM}]}] if case.get("system", True) else []
        messages.append({"role": "user", "content": content})
        text = self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        given = {MEDIA[kind][0]: [MEDIA[kind][1]()] for kind in media}
        inputs = self.processor(text=text, return_tensors="pt", **given)
        self.seen = {"prompt": inputs["input_ids"][0].tolist()}
        try:
            self.model.generate(
                **inputs,
                speaker=case["voice"],
                thinker_max_new_tokens=case.get("max_text", TEXT),
                thinker_do_sample=False,
                thinker_eos_token_id=self.ends,
                talker_max_new_tokens=case.get("max_codes", CODES),
                talker_do_sample=False,
                talker_top_k=None,
                talker_top_p=None,
                talker_temperature=None,
            )
        except (ValueError, RuntimeError, IndexError) as error:
            return f"{type(error).__name__}: {error}"
        return None

    def wave(self, codes: list[int], voice: str, start: int = 0) -> torch.Tensor:
        """``token2wav`` over ``codes``, whose first one is frame ``start`` of the speech, from the noise of :data:`SEED`."""
        speaker = self.model.speaker_map[voice]
        dit = self.model.token2wav.code2wav_dit_model
        rows = len(codes) * dit.repeats
        ours = noise(SEED, start * dit.repeats, start * dit.repeats + rows, dit.mel_dim)

        def randn(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
            out = torch.zeros(shape, dtype=dtype)
            out[:, :rows] = ours
            return out

        drawn, torch.randn = torch.randn, randn  # type: ignore[assignment]
        try:
            return self.vocode(
                torch.tensor([codes], dtype=torch.long),
                conditioning=speaker["cond"].float(),
                reference_mel=speaker["ref_mel"].float(),
            )
        finally:
            torch.randn = drawn

    def chunked(self, codes: list[int], voice: str) -> torch.Tensor:
        """The same in chunks, each with what is known before it and after it, of which only the chunk's samples are kept."""
        parts = []
        for start in range(0, len(codes), CHUNK):
            first, end = max(0, start - CONTEXT), min(len(codes), start + CHUNK)
            wave = self.wave(codes[first : end + AHEAD], voice, first)
            parts.append(wave[(start - first) * 480 : (end - first) * 480])
        return torch.cat(parts)


def speaker(checkpoint: str) -> Callable[[list[dict[str, Any]]], list[list[list[int]]]]:
    """For ``speak.py``: the model's own generate, waveform included, with nothing looked at but the codes."""
    folder = Path(checkpoint)
    processor = AutoProcessor.from_pretrained(folder, use_fast=False)
    model = Qwen2_5OmniForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    ends = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
    inner, said = model.talker.generate, {}

    def generate(**given: Any) -> torch.Tensor:
        said["codes"], said["prompt"] = inner(**given), given["input_ids"].shape[1]
        return said["codes"]

    model.talker.generate = generate

    def answer(prompts: list[dict[str, Any]]) -> list[list[list[int]]]:
        (prompt,) = prompts  # its generate takes no batch
        messages = [
            {"role": "system", "content": [{"type": "text", "text": SYSTEM}]},
            {"role": "user", "content": [{"type": "text", "text": prompt["text"]}]},
        ]
        text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        model.generate(
            **processor(text=text, return_tensors="pt"),
            speaker=prompt["voice"],
            thinker_max_new_tokens=prompt["tokens"] + 1,
            thinker_do_sample=False,
            thinker_eos_token_id=ends,
            talker_max_new_tokens=prompt["frames"],
            talker_do_sample=False,
            talker_top_k=None,
            talker_top_p=None,
            talker_temperature=None,
        )
        return [[[code] for code in said["codes"][0, said["prompt"] :].tolist() if code < CODEC_END]]

    return answer


def golden(reference: Reference, name: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Run one case; its plain values, with what is large put into ``tensors``."""
    case = CASES[name]
    error = reference.run(case)
    seen = reference.seen
    prompt = seen["prompt"]
    made: dict[str, Any] = {**case, "prompt_ids": prompt, "text_ids": seen["thinker"].sequences[0, len(prompt) :].tolist()}
    made["text_margin"] = margin(seen["thinker"].scores)
    assert made["text_margin"] > LIMIT, (name, made["text_margin"])
    if "talker" not in seen:
        assert error is not None and len(made["text_ids"]) == 1, (name, error)
        return {**made, "fault": error}
    codes = seen["talker"].sequences[0, len(prompt) + 2 :].tolist()
    made |= {"codes": codes, "codes_margin": margin(seen["talker"].scores)}
    assert made["codes_margin"] > LIMIT, (name, made["codes_margin"])
    assert seen["dropped_last"] == codes[:-1]
    frames = codes[:-1] if codes[-1] >= CODEC_END else codes
    assert all(code < 8192 for code in frames), name
    if name in ROWS:
        tensors[f"{name}.prompt_rows"] = seen["talker_given"]["inputs_embeds"][0]
        tensors[f"{name}.reply_rows"] = seen["talker_given"]["thinker_reply_part"][0]
    if case.get("media"):
        positions, delta = seen["positions"]
        tensors[f"{name}.positions"] = positions[:, 0].to(torch.int32)
        made["position_delta"] = int(delta)
    if not frames:
        try:
            reference.wave(frames, case["voice"])
        except (ValueError, RuntimeError, IndexError) as fault:
            return {**made, "fault": f"{type(fault).__name__}: {fault}"}
        raise AssertionError(f"{name}: the reference speaks of nothing")
    wave = reference.wave(frames, case["voice"])
    assert wave.shape == (480 * len(frames),), (name, wave.shape)
    made["samples"], made["peak"] = len(wave), float(wave.abs().max())
    tensors[f"{name}.wave"] = wave.clone() if name in WHOLE else wave[::8].clone()
    if name == "steady":
        tensors["steady.chunked"] = reference.chunked(frames, case["voice"])
    return made


def main() -> None:
    checkpoint, out, digest = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    reference = Reference(checkpoint)
    tensors: dict[str, torch.Tensor] = {}
    with torch.inference_mode():
        cases = {name: golden(reference, name, tensors) for name in CASES}
    told = {
        "checkpoint": digest,
        "reference": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "seed": SEED,
        "chunk": {"frames": CHUNK, "context": CONTEXT, "ahead": AHEAD},
        "smallest_margin": min(case.get(f"{what}_margin", 1.0) for case in cases.values() for what in ("text", "codes")),
        "cases": cases,
    }
    (out / "golden.json").write_text(json.dumps(told) + "\n", encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "waveforms.safetensors")
    for name, case in cases.items():
        margins = " ".join(f"{case[key]:.4f}" for key in ("text_margin", "codes_margin") if key in case)
        print(
            f"{name}: text {len(case['text_ids'])}, codes {len(case.get('codes', ()))}, margins {margins}, {case.get('fault', '')}"
        )


if __name__ == "__main__":
    main()
