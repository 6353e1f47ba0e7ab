"""The reference of Qwen3-Omni: the model of ``transformers``, as it is, one prompt at a time, greedy, float32.

``qwen3_omni.py CHECKPOINT OUT DIGEST`` writes ``golden.json`` and ``waveforms.safetensors``. :class:`Reference` is used live by
a test too. What the reference gets wrong is in ``FAULTS``, and in ``golden.json`` beside the values.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoProcessor, Qwen3OmniMoeForConditionalGeneration

from stagevox.bench.media import film, picture, tone

LEAST_MARGIN = 1e-3
STRIDE = 61
"""Waveforms are kept as every 61st sample: the stride is coprime to the 1920 samples of a frame, so all phases are seen."""

CHUNK, CONTEXT = 10, 25
"""Frames of a chunk and of its left context in the chunked vocoder runs; the reference's own generate uses 300 and 25."""

FAULTS = [
    "A reply of one token (the end at once) raises: the assistant part has 8 text rows and 9 codec rows.",
    "The end id as the talker's first token raises: there are no frames to stack.",
    "Of n layer-0 tokens the last never becomes a frame, not even when generation stops by length.",
    "A thinker cut at n tokens leaves the last token unspoken: its row is only there at n + 1.",
    "generate() has the published token ids as defaults; other ids must be passed.",
    "A talker of default configuration can't be built: shared_expert_intermediate_size and spatial_merge_size have no defaults.",
    "code2wav loses 555 samples at the end of each chunk, so the output depends on the chunk size.",
    "A picture and a sound in one prompt raise in the talker: its get_rope_index() reads audio_config, which only the thinker has.",
]


class Case(NamedTuple):
    """A prompt and how to answer it. Media are named by what makes them, see :func:`make_media`."""

    messages: list[dict[str, Any]]
    speaker: str = "Ethan"
    text_tokens: int = 16
    codes: int = 32
    images: tuple[tuple[int, ...], ...] = ()
    audios: tuple[tuple[float, float], ...] = ()
    videos: tuple[tuple[int, int, int], ...] = ()


class Reply(NamedTuple):
    """What the reference answered."""

    prompt_ids: list[int]
    """The prompt with its media placeholders expanded."""
    text_ids: list[int]
    layer0: list[int]
    """Layer-0 tokens, the one that ended the reply included."""
    codes: torch.Tensor
    """``[frames, Q]``."""
    waveform: torch.Tensor
    """``[samples]``, 24 kHz."""
    margins: dict[str, float]
    """Least distance between the best and the second choice, over all decisions of the thinker, the talker, the predictor."""


def user(text: str, **media: int) -> list[dict[str, Any]]:
    """A single turn; ``image=1`` and so on put media before the text."""
    parts: list[dict[str, Any]] = [{"type": kind} for kind, count in media.items() for _ in range(count)]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def turns(system: str, *parts: list[dict[str, Any]] | str) -> list[dict[str, Any]]:
    """A chat: users' turns as :func:`user` makes them, the assistant's as strings."""
    chat: list[dict[str, Any]] = [{"role": "system", "content": system}]
    for part in parts:
        chat += [{"role": "assistant", "content": part}] if isinstance(part, str) else part
    return chat


LONG = "test this the hear over in brown the do you hello slowly this is hear world of sound quick is"
LONG += " , tiny of what is in runtime sound in the of fox is speak world hello sound the lazy brown omni"
ON = "slowly speak of over omni of this the sound brown speak speak picture runtime omni omni omni see hear omni"
ON += " , stage over lazy lazy of hello of this over this this speak the do fox see a jumps do this"

CASES: dict[str, Case] = {
    "short": Case(user("runtime")),
    "turns": Case(turns("You are Qwen", user("picture sound dog"), "this is", user("stage hear hello")), "Chelsie"),
    "long": Case(user(LONG), "Aiden"),
    "goes_on": Case(user(ON), "Aiden", codes=60),  # cut by length, several chunks of the vocoder
    "cut_5": Case(user("lazy"), text_tokens=5),
    "cut_6": Case(user("lazy"), text_tokens=6),
    "cut_7": Case(user("lazy"), text_tokens=7),
    "two_tokens": Case(user("hello"), "Chelsie"),
    "one_token": Case(user("omni the stage omni what")),
    "silent": Case(user("a")),  # the talker ends at once
    "image": Case(user("world of", image=1), images=((96, 64),)),
    "audio": Case(user("do quick", audio=1), audios=((1.3, 300.0),)),
    "video": Case(user("lazy speak quick", video=1), videos=((2, 96, 64),)),
    "mixed": Case(
        turns("You are Qwen", user("slowly picture", image=1), "hear the", user("stage a a", audio=1, image=1)),
        "Aiden",
        images=((64, 64), (96, 64)),
        audios=((0.7, 440.0),),
    ),
}


def make_media(case: Case) -> dict[str, list[Any]]:
    """The case's media as the processor takes them: arrays."""
    made: dict[str, list[Any]] = {}
    if case.images:
        made["images"] = [picture(*size) for size in case.images]
    if case.audios:
        made["audio"] = [tone(*shape) for shape in case.audios]
    if case.videos:
        made["videos"] = [film(*shape) for shape in case.videos]
    return made


def _least(scores: tuple[torch.Tensor, ...]) -> float:
    best = torch.cat(scores).float().topk(2).values
    return float((best[:, 0] - best[:, 1]).min())


class Reference:
    """The model of ``transformers`` on a checkpoint."""

    def __init__(self, checkpoint: Path) -> None:
        transformers.logging.set_verbosity_error()
        self.processor = AutoProcessor.from_pretrained(checkpoint)
        self.model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
        # The last of the faults, repaired: nothing else of the model is touched.
        self.model.talker.config.audio_config = self.model.config.thinker_config.audio_config

    def inputs(self, case: Case) -> Mapping[str, torch.Tensor]:
        """What the processor makes of a case; one long string, as chats are tokenized."""
        text = self.processor.apply_chat_template(case.messages, add_generation_prompt=True, tokenize=False)
        videos = {"fps": 1.0, "do_sample_frames": False} if case.videos else {}
        return self.processor(text=text, return_tensors="pt", **make_media(case), **videos)

    @torch.inference_mode()
    def reply(self, case: Case) -> Reply:
        """Think, talk, make the waveform."""
        config, talker = self.model.config, self.model.talker
        inputs = dict(self.inputs(case))
        seen: dict[str, Any] = {"residuals": []}

        def spy(name: str, module: Any) -> None:
            generate = type(module).generate

            def wrapped(*args: Any, **kwargs: Any) -> Any:
                result = generate(module, *args, **kwargs, output_scores=True)
                seen["residuals"].append(result) if name == "residuals" else seen.update({name: result})
                return result

            module.generate = wrapped

        modules = {"thinker": self.model.thinker, "talker": talker, "residuals": talker.code_predictor}
        for name, module in modules.items():
            spy(name, module)
        try:
            sequence, waveform = self.model.generate(
                **inputs,
                speaker=case.speaker,
                thinker_max_new_tokens=case.text_tokens,
                thinker_do_sample=False,
                thinker_eos_token_id=[config.im_end_token_id],
                talker_do_sample=False,
                talker_max_new_tokens=case.codes,
                talker_top_k=None,
                talker_top_p=None,
                talker_temperature=None,
            )
            waveform = waveform.reshape(-1)
        except RuntimeError:
            # Two of the faults: the text of one token, and no frames. What was generated until then is right.
            sequence, waveform = seen["thinker"].sequences, torch.zeros(0)
            if "talker" in seen:
                assert seen["talker"].sequences.tolist() == [[config.talker_config.codec_eos_token_id]]
            else:
                assert sequence.shape[1] == inputs["input_ids"].shape[1] + 1
        finally:
            for module in modules.values():
                del module.generate
        prompt = inputs["input_ids"][0].tolist()
        spoken = seen.get("talker")
        frames = [hidden[-1] for hidden in spoken.hidden_states if hidden[-1] is not None] if spoken else []
        return Reply(
            prompt_ids=prompt,
            text_ids=sequence[0, len(prompt) :].tolist(),
            layer0=spoken.sequences[0].tolist() if spoken else [],
            codes=torch.cat(frames) if frames else torch.zeros(0, config.talker_config.num_code_groups, dtype=torch.long),
            waveform=waveform,
            margins={
                "thinker": _least(seen["thinker"].scores),
                "talker": _least(spoken.scores) if spoken else math.inf,
                "predictor": min((_least(result.scores) for result in seen["residuals"]), default=math.inf),
            },
        )

    @torch.inference_mode()
    def decode(self, codes: torch.Tensor, chunk: int, context: int) -> torch.Tensor:
        """``codes [frames, Q]`` in chunks: ``[samples]``."""
        return self.model.code2wav.chunked_decode(codes.T[None], chunk, context).reshape(-1)


def speaker(checkpoint: str) -> Callable[[list[dict[str, Any]]], list[list[list[int]]]]:
    """For ``speak.py``: the model's own generate, waveform included, with nothing looked at but the codes."""
    reference = Reference(Path(checkpoint))
    model, end = reference.model, reference.model.config.im_end_token_id
    vocode, said = model.code2wav.chunked_decode, {}

    def chunked_decode(codes: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
        said["codes"] = codes
        return vocode(codes, *given, **options)

    model.code2wav.chunked_decode = chunked_decode

    @torch.inference_mode()
    def answer(prompts: list[dict[str, Any]]) -> list[list[list[int]]]:
        (prompt,) = prompts  # its generate is right for one prompt at a time only
        model.generate(
            **reference.inputs(Case(user(prompt["text"]))),
            speaker=prompt["voice"],
            thinker_max_new_tokens=prompt["tokens"] + 1,
            thinker_do_sample=False,
            thinker_eos_token_id=[end],
            talker_do_sample=False,
            talker_max_new_tokens=prompt["frames"] + 1,
            talker_top_k=None,
            talker_top_p=None,
            talker_temperature=None,
        )
        return [said["codes"][0].T.tolist()]

    return answer


def main(checkpoint: Path, out: Path, digest: str) -> None:
    """Write the golden values of all cases."""
    reference = Reference(checkpoint)
    tensors: dict[str, torch.Tensor] = {}
    cases: dict[str, Any] = {}
    for name, case in CASES.items():
        reply = reference.reply(case)
        assert min(reply.margins.values()) > LEAST_MARGIN, (name, reply.margins)
        chunked = reference.decode(reply.codes, CHUNK, CONTEXT) if len(reply.codes) else torch.zeros(0)
        cases[name] = {
            "case": case._asdict(),
            "prompt_ids": reply.prompt_ids,
            "text_ids": reply.text_ids,
            "layer0": reply.layer0,
            "codes": reply.codes.tolist(),
            "samples": len(reply.waveform),
            "chunked_samples": len(chunked),
            "margins": {part: margin for part, margin in reply.margins.items() if margin < math.inf},
        }
        tensors[name] = reply.waveform[::STRIDE].contiguous()
        tensors[f"{name}.chunked"] = chunked[::STRIDE].contiguous()
        print(f"{name}: {len(reply.text_ids)} tokens, {len(reply.codes)} frames, margins {reply.margins}")
    golden = {
        "checkpoint": digest,
        "reference": {"transformers": transformers.__version__, "torch": torch.__version__},
        "faults": FAULTS,
        "stride": STRIDE,
        "chunk": CHUNK,
        "context": CONTEXT,
        "cases": cases,
    }
    (out / "golden.json").write_text(json.dumps(golden) + "\n", encoding="utf-8")
    save_file(tensors, out / "waveforms.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
