"""Golden values of Qwen3-TTS from the official package ``qwen-tts``: ``qwen3_tts.py CHECKPOINT OUT DIGEST``.

Runs in an environment of its own (``run.py`` makes it). Written are

- ``cases.json``: for each case its prompt, text ids, codes ``[T][Q]``, the smallest margins between the two best scores of all
  decisions for layer 0 and for the residual groups, and a summary of the waveform;
- ``waves.safetensors``: for each case every ``STRIDE``-th sample, and one waveform whole;
- ``parameters.json``: names and shapes of all tensors of the reference's default, full-size configs.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

STRIDE = 29
"""Kept samples; it shares no factor with 1920, so that every offset in a frame is seen."""

MARGIN = 1e-3

FAULTS = [
    "max_new_tokens = n gives n - 1 frames: the last layer-0 token never gets residual codes, also when it is no end.",
    "max_new_tokens = 1 fails: there is no frame to stack.",
    "A batch is padded on the left; cases are run one by one.",
    "tts_model_size '0b6' (any substring of it, such as '0' or 'b') silently drops the instruct.",
    "A speaker in another case of letters is taken; an empty one silently leaves the speaker row out.",
    "chunked_decode cuts the context of later chunks: where the decoder looks back further, chunk and context change samples.",
]


class Absent(ModuleType):
    """Stands in for a module that the package imports and that speech from text doesn't use."""

    __path__: list[str] = []  # noqa: RUF012 - what makes a module a package

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self.__name__}.{name}")

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Nothing here is meant to be called."""
        raise RuntimeError(f"{self.__name__} is not installed")


def stand_in() -> None:
    """Put stand-ins where optional imports of the package would fail."""
    for name in ("librosa", "soundfile", "sox", "onnxruntime", "torchaudio", "einops", "accelerate"):
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = Absent(name)
    for name in ("librosa.filters", "torchaudio.compliance", "torchaudio.compliance.kaldi"):
        if isinstance(sys.modules.get(name.split(".")[0]), Absent):
            sys.modules[name] = Absent(name)


Case = dict[str, Any]
DEFAULTS: Case = {"language": "Auto", "instruct": None, "streaming_text": False, "max_new_tokens": 41}
HUMAN = "you are a virtual human, capable of perceiving auditory and visual inputs"
CASES: dict[str, Case] = {
    "plain": {"text": "hello world this is a tiny test", "voice": "Vivian", "language": "English"},
    "streaming": {"text": "hello world this is a tiny test", "voice": "Vivian", "language": "English", "streaming_text": True},
    "auto": {"text": "the quick brown fox jumps over the lazy dog", "voice": "Ryan"},
    "instruct": {"text": "what do you see", "voice": "Serena", "language": "German", "instruct": "slowly please"},
    "dialect": {"text": "the stage runtime", "voice": "Eric"},
    "dialect chinese": {"text": "你好世界", "voice": "dylan", "language": "Chinese", "streaming_text": True},
    "dialect english": {"text": "the stage runtime", "voice": "Eric", "language": "English"},
    "one token": {"text": "hello", "voice": "Vivian", "streaming_text": True},
    "two tokens": {"text": "tiny world", "voice": "Serena", "streaming_text": True},
    "one token whole": {"text": "hello", "voice": "Vivian"},
    "one frame": {"text": "picture sound", "voice": "Ryan", "max_new_tokens": 2},
    "two frames": {"text": "picture sound", "voice": "Ryan", "max_new_tokens": 3},
    "cut at 8": {"text": "tiny test of the omni stage", "voice": "Vivian", "max_new_tokens": 9},
    "cut at 9": {"text": "tiny test of the omni stage", "voice": "Vivian", "max_new_tokens": 10},
    "earliest end": {"text": HUMAN, "voice": "Ryan", "language": "English",
                     "max_new_tokens": 91},
    # Without its least length this reply would end before the first frame.
    "end first": {"text": "hear", "voice": "Vivian", "language": "English", "streaming_text": True},
    "long": {"text": "the quick brown fox jumps over the lazy dog. what do you see in the picture", "voice": "Ryan",
             "language": "English", "max_new_tokens": 91},
    "long streaming": {"text": HUMAN + " as well as generating text and speech",
                       "voice": "Ryan", "language": "English", "streaming_text": True, "max_new_tokens": 91},
    "long instruct": {"text": "what do you see", "voice": "Serena", "language": "German", "instruct": "please speak"},
}  # fmt: skip
CHUNKS = ((10, 25), (7, 5), (16, 16))
"""Chunk and left context, in frames, of the chunked runs of the decoder."""

CHUNKED_FRAMES = 60
WHOLE = "one frame"
"""The case whose waveform is kept whole."""


@contextmanager
def margins() -> Iterator[dict[int, float]]:
    """Collect the smallest margin of each width of scores while greedy generation runs, which is an argmax a decision."""
    smallest: dict[int, float] = {}
    argmax = torch.argmax

    def watched(scores: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        if scores.is_floating_point() and scores.dim() == 2:
            best = scores.topk(2, dim=-1).values
            margin = float((best[:, 0] - best[:, 1]).min())
            smallest[scores.shape[1]] = min(margin, smallest.get(scores.shape[1], margin))
        return argmax(scores, *arguments, **options)

    torch.argmax = watched  # type: ignore[assignment]
    try:
        yield smallest
    finally:
        torch.argmax = argmax


def load(checkpoint: str) -> Any:
    """The official model, float32 on one thread."""
    stand_in()
    import transformers
    from qwen_tts import Qwen3TTSModel

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    return Qwen3TTSModel.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="sdpa")


def generate(model: Any, cases: list[Case]) -> tuple[list[Any], dict[str, Any]]:
    """Cases of one length and text mode through the official entry point, greedy; waveforms, and what the model was given and made."""
    kept: dict[str, Any] = {}
    inner: Callable[..., Any] = model.model.generate

    def watched(**options: Any) -> Any:
        kept["options"] = options
        result = inner(**options)
        kept["codes"] = result[0]
        return result

    model.model.generate = watched
    nothing = dict.fromkeys(
        ("top_k", "top_p", "temperature", "subtalker_top_k", "subtalker_top_p", "subtalker_temperature"), None
    )
    try:
        waves, _ = model.generate_custom_voice(
            [case["text"] for case in cases],
            speaker=[case["voice"] for case in cases],
            language=[case["language"] for case in cases],
            instruct=[case["instruct"] for case in cases],
            non_streaming_mode=not cases[0]["streaming_text"],
            do_sample=False,
            subtalker_dosample=False,
            repetition_penalty=1.05,
            max_new_tokens=cases[0]["max_new_tokens"],
            **nothing,
        )
    finally:
        model.model.generate = inner
    return waves, kept


def speak(model: Any, case: Case) -> dict[str, Any]:
    """One case, with its margins."""
    with margins() as smallest:
        waves, kept = generate(model, [case])
    instruct = kept["options"]["instruct_ids"][0]
    widths = sorted(smallest)
    return {
        "ids": kept["options"]["input_ids"][0][0].tolist(),
        "instruct_ids": [] if instruct is None else instruct[0].tolist(),
        "codes": kept["codes"][0],
        "wave": torch.from_numpy(waves[0]),
        "residual": smallest[widths[0]],
        "layer 0": smallest[widths[1]],
    }


def speaker(checkpoint: str) -> Callable[[list[Case]], list[list[list[int]]]]:
    """For ``speak.py``."""
    model = load(checkpoint)

    def answer(prompts: list[Case]) -> list[list[list[int]]]:
        cases = [DEFAULTS | prompt | {"max_new_tokens": prompt["frames"] + 1} for prompt in prompts]
        return [codes.tolist() for codes in generate(model, cases)[1]["codes"]]

    return answer


def summary(wave: torch.Tensor) -> dict[str, Any]:
    """What is said of a waveform in JSON."""
    return {
        "samples": wave.numel(),
        "rms": float(wave.double().square().mean().sqrt()),
        "clipped": int((wave.abs() >= 1).sum()),
        "sha256": hashlib.sha256(wave.contiguous().numpy().tobytes()).hexdigest(),
    }


def parameters() -> dict[str, Any]:
    """Names and shapes for the package's default configs; made without storage."""
    from qwen_tts.core.models import Qwen3TTSConfig
    from qwen_tts.core.models.modeling_qwen3_tts import Qwen3TTSForConditionalGeneration
    from qwen_tts.core.tokenizer_12hz.configuration_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Config
    from qwen_tts.core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Model

    # As the defaults leave them open: what the talker's attention reads, and groups as many as the speech tokenizer's.
    rope = {"rope_type": "default", "mrope_section": [24, 20, 20], "interleaved": True}
    predictor = {"num_code_groups": 16}
    talker: dict[str, Any] = {"head_dim": 128, "text_vocab_size": 151936, "rope_scaling": rope, "num_code_groups": 16}
    talker |= {"code_predictor_config": predictor, "spk_id": {}, "spk_is_dialect": {}, "codec_language_id": {}}
    talker |= {"codec_eos_token_id": 2150}  # the default's lies outside the default vocabulary
    # Another width of the talker, so that the projection into the predictor is there.
    wide = talker | {"hidden_size": 2048}
    found: dict[str, Any] = {}
    with torch.device("meta"):
        for name, config in (("talker", talker), ("wide talker", wide)):
            made = Qwen3TTSForConditionalGeneration(
                Qwen3TTSConfig(talker_config=config, tts_model_type="custom_voice", tts_model_size="1b7")
            )
            tensors = {key: list(value.shape) for key, value in made.state_dict().items()}
            found[name] = {"config": made.config.talker_config.to_dict(), "tensors": tensors}
        # The quantizer's width has no default.
        config = Qwen3TTSTokenizerV2Config(decoder_config={"codebook_dim": 512})
        vocoder = Qwen3TTSTokenizerV2Model(config).decoder
        tensors = {f"decoder.{key}": list(value.shape) for key, value in vocoder.state_dict().items()}
        found["decoder"] = {"config": config.decoder_config.to_dict(), "tensors": tensors}
    return found


def main(checkpoint: str, out: str, digest: str) -> None:
    model = load(checkpoint)
    import transformers
    from safetensors import safe_open
    from safetensors.torch import save_file

    folder, golden = Path(checkpoint), Path(out)
    for part, files in (
        (model.model, folder.glob("*.safetensors")),
        (model.model.speech_tokenizer.model, folder.glob("speech_tokenizer/*.safetensors")),
    ):
        stored: set[str] = set()
        for file in files:
            with safe_open(file, "pt") as opened:
                stored |= set(opened.keys())
        wanted = set(part.state_dict())
        assert stored == wanted, f"missing {sorted(wanted - stored)[:4]}, not wanted {sorted(stored - wanted)[:4]}"

    cases: dict[str, Any] = {}
    waves: dict[str, torch.Tensor] = {}
    for name, given in CASES.items():
        case = DEFAULTS | given
        made = speak(model, case)
        frames, wave = made["codes"].tolist(), made["wave"]
        ended = len(frames) < case["max_new_tokens"] - 1
        print(f"{name}: {len(frames)} frames, ended {ended}, margins {made['layer 0']:.2e} {made['residual']:.2e}")
        cases[name] = case | {
            "text_ids": made["ids"],
            "instruct_ids": made["instruct_ids"],
            "codes": frames,
            "ended": ended,
            "margins": {"layer 0": made["layer 0"], "residual": made["residual"]},
            "wave": summary(wave),
        }
        waves[name] = wave[::STRIDE].clone()
        if name == WHOLE:
            waves["whole"] = wave.clone()
    worst = {name: min(case["margins"].values()) for name, case in cases.items()}
    close = {name: margin for name, margin in worst.items() if margin <= MARGIN}
    assert not close, f"two scores are too close: choose other texts: {close}"

    decoder = model.model.speech_tokenizer.model.decoder
    generator = torch.Generator().manual_seed(7)
    frames = torch.randint(decoder.config.codebook_size, (CHUNKED_FRAMES, decoder.config.num_quantizers), generator=generator)
    chunked = {}
    with torch.inference_mode():
        for chunk, context in (*CHUNKS, (300, 25)):
            wave = decoder.chunked_decode(frames.T[None], chunk, context)[0, 0]
            chunked[f"{chunk}/{context}"] = summary(wave)
            waves[f"{chunk}/{context}"] = wave[::STRIDE].clone()
    golden.mkdir(parents=True, exist_ok=True)
    written = {
        "checkpoint": digest,
        "versions": {"qwen-tts": "0.1.1", "transformers": transformers.__version__, "torch": torch.__version__},
        "stride": STRIDE,
        "cases": cases,
        "chunked": {"codes": frames.tolist(), "runs": chunked},
        "faults": FAULTS,
    }
    (golden / "cases.json").write_text(json.dumps(written, separators=(",", ":")) + "\n", encoding="utf-8")
    (golden / "parameters.json").write_text(json.dumps(parameters(), separators=(",", ":")) + "\n", encoding="utf-8")
    save_file(waves, golden / "waves.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
