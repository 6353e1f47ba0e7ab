"""The 12 Hz decoder and its stage against the reference's samples, without an engine."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from stagevox.connectors.base import Chunk
from stagevox.contract import CODES, NUM_COMPUTED_TOKENS, SAMPLE_RATE, WAVEFORM, OwnedBatchTensor, RowsAt
from stagevox.errors import CheckpointError, ConfigError, ContractError, MissingStateError
from stagevox.models.qwen3_tts.bridge import Code2WavInput
from stagevox.models.qwen3_tts.code2wav import Qwen3TTSCode2Wav
from stagevox.models.qwen3_tts.config import Qwen3TTSTokenizerConfig
from stagevox.models.windows import CODES_STATE, WINDOW
from stagevox.stage.payload import StageRequest
from support.qwen3_tts import FRAME, TOLERANCE, case, checkpoint, golden, waves

STRIDE = golden()["stride"]


@pytest.fixture(scope="module")
def model():
    folder = checkpoint() / "speech_tokenizer"
    config = Qwen3TTSTokenizerConfig(**json.loads((folder / "config.json").read_text(encoding="utf-8")))
    made = Qwen3TTSCode2Wav(vllm_config=SimpleNamespace(model_config=SimpleNamespace(hf_config=config))).requires_grad_(False)
    made.load_weights(load_file(folder / "model.safetensors").items())
    return made


def codes_of(name):
    return torch.tensor(case(name)["codes"])


def samples_of(value):
    """What the model gives away, or nothing."""
    return value.tensor if isinstance(value, OwnedBatchTensor) else value


def run(model, codes, spans, window):
    """Samples of one request, span by span."""
    made, start = [], 0
    for span in spans:
        state = {CODES_STATE: codes, WINDOW: window, NUM_COMPUTED_TOKENS: start}
        output = model.forward(
            None, torch.arange(span), model_intermediate_buffer=[state], request_token_spans=[(0, span)]
        ).multimodal_outputs
        assert output[SAMPLE_RATE] == [24000]
        made.append(samples_of(output[WAVEFORM][0]))
        start += span
    return torch.cat(made)


@pytest.mark.parametrize("name", list(golden()["cases"]))
def test_the_decoder_is_the_references(model, name):
    codes = codes_of(name)
    samples = model.decoder(codes.T[None])[0]
    assert len(samples) == FRAME * len(codes) == case(name)["wave"]["samples"]
    torch.testing.assert_close(samples[::STRIDE], waves()[name], atol=TOLERANCE, rtol=0)
    assert samples.abs().max() < 1, "limited: errors would not be seen"


def test_the_decoder_is_bit_equal_where_the_library_is_the_same(model):
    """One frame alone takes another attention kernel there: 5e-7 apart."""
    if torch.__version__ != golden()["versions"]["torch"] or torch.get_num_threads() != 1:
        pytest.skip("bits depend on PyTorch's version and threads")
    name = "long streaming"
    samples = model.decoder(codes_of(name).T[None])[0]
    if not torch.equal(samples[::STRIDE], waves()[name]):
        pytest.skip("bits depend on the processor's instructions, too")
    assert hashlib.sha256(samples.contiguous().numpy().tobytes()).hexdigest() == case(name)["wave"]["sha256"]


@pytest.mark.covers("EX-9")
@pytest.mark.parametrize("run_name", list(golden()["chunked"]["runs"]))
@pytest.mark.parametrize("spans", [[60], [1] * 60, [7, 20, 3, 29, 1], [25, 35]], ids=lambda spans: f"{len(spans)} spans")
def test_windows_are_the_references_chunks_however_frames_come(model, run_name, spans):
    """The reference run with the same chunk and context, sample for sample."""
    chunked = golden()["chunked"]
    codes = torch.tensor(chunked["codes"])
    chunk, context = map(int, run_name.split("/"))
    samples = run(model, codes, spans, (chunk, context))
    assert len(samples) == FRAME * len(codes) == chunked["runs"][run_name]["samples"]
    torch.testing.assert_close(samples[::STRIDE], waves()[run_name], atol=TOLERANCE, rtol=0)


def test_chunk_and_context_matter(model):
    """So that the test above could tell: each run differs from the others by far more than the tolerance."""
    runs = list(golden()["chunked"]["runs"])
    for one in runs:
        for other in runs:
            assert one == other or (waves()[one] - waves()[other]).abs().max() > 1e3 * TOLERANCE


@pytest.mark.covers("EX-4", "EX-9")
def test_requests_of_unequal_length_share_a_forward(model):
    names = ["plain", "two frames", "long", "dialect chinese"]
    computed, window = [13, 0, 7, 23], (10, 4)
    states, spans, start = [], [], 0
    for name, first in zip(names, computed, strict=True):
        codes = codes_of(name)
        states.append({CODES_STATE: codes, WINDOW: window, NUM_COMPUTED_TOKENS: first})
        spans.append((start, start + len(codes) - first))
        start = spans[-1][1]
    output = model.forward(None, torch.arange(start), model_intermediate_buffer=states, request_token_spans=spans)
    for name, first, samples in zip(names, computed, output.multimodal_outputs[WAVEFORM], strict=True):
        codes = codes_of(name)
        alone = run(model, codes, [len(codes)], window)[first * FRAME :]
        torch.testing.assert_close(samples_of(samples), alone, atol=TOLERANCE, rtol=0)


def test_no_border_is_heard(model):
    """Where chunks meet, samples step no more than elsewhere, and none is missing."""
    codes = codes_of("plain")
    whole = run(model, codes, [40], (300, 25))
    cut = run(model, codes, [4, 12, 24], (300, 25))
    torch.testing.assert_close(cut, whole, atol=TOLERANCE, rtol=0)
    steps = whole.diff().abs()
    borders = torch.tensor([4, 16]) * FRAME - 1
    assert (cut.diff().abs()[borders] - steps[borders]).abs().max() < 2 * TOLERANCE


def test_positions_past_the_codes_raise(model):
    with pytest.raises(ContractError, match="positions up to 3 are scheduled, codes has 2 frames"):
        run(model, codes_of("two frames"), [3], (300, 25))


def test_missing_or_misshapen_state_raises(model):
    for state, error in (
        ({WINDOW: (300, 25)}, MissingStateError),
        ({CODES_STATE: torch.zeros(3, 16, dtype=torch.long)}, MissingStateError),
        ({CODES_STATE: torch.zeros(3, 4, dtype=torch.long), WINDOW: (300, 25)}, ContractError),
    ):
        with pytest.raises(error):
            model.forward(
                None,
                torch.arange(3),
                model_intermediate_buffer=[state | {NUM_COMPUTED_TOKENS: 0}],
                request_token_spans=[(0, 3)],
            )


def adapter(**options):
    return Code2WavInput(checkpoint() / "speech_tokenizer", **options)


def chunk(seq, frames, end=False):
    return Chunk("a", seq, end, {} if frames is None else {CODES: frames})


REQUEST = StageRequest("a", None)


def test_chunks_become_positions():
    made, codes = adapter(), codes_of("plain")
    first = made.accept(REQUEST, chunk(0, codes[:4]))
    last = made.accept(REQUEST, chunk(1, codes[4:9], end=True))
    assert (len(first.prompt_token_ids), first.end) == (4, False) and (len(last.prompt_token_ids), last.end) == (5, True)
    piece = last.payload[CODES_STATE]
    assert isinstance(piece, RowsAt) and piece.first == 4 and torch.equal(piece.rows, codes[4:9])
    assert last.payload[WINDOW] == (300, 25)
    again = made.accept(REQUEST, chunk(0, codes[:2]))
    assert again.payload[CODES_STATE].first == 0


def test_an_end_without_frames():
    made = adapter()
    only = made.accept(REQUEST, chunk(0, None, end=True))
    assert only.end and only.prompt_token_ids == [] and not only.payload
    made.accept(REQUEST, chunk(0, codes_of("two frames")))
    assert made.accept(REQUEST, chunk(1, None, end=True)).prompt_token_ids == []


@pytest.mark.parametrize(
    "frames",
    [torch.full((2, 16), 256), torch.full((2, 16), -1), torch.zeros(2, 15, dtype=torch.long), torch.zeros(16, dtype=torch.long)],
)
def test_what_is_no_frame_raises(frames):
    with pytest.raises(ContractError, match="holds no codec frames"):
        adapter().accept(REQUEST, chunk(0, frames))


def test_a_lost_chunk_raises():
    with pytest.raises(ContractError, match="chunk 1 of a came, 0 was next"):
        adapter().accept(REQUEST, chunk(1, codes_of("two frames")))


def test_bad_windows_are_refused(tmp_path):
    for options in ({"window_frames": 0}, {"left_context": -1}):
        with pytest.raises(ConfigError, match="window"):
            adapter(**options)
    with pytest.raises(CheckpointError, match=r"config.json can't be read"):
        Code2WavInput(Path(tmp_path))


def test_the_convolutions_reach_no_further_than_said(model):
    """A change of the latents changes samples up to ``reach`` frames later, and none after."""
    decoder = model.decoder
    latents = torch.randn(1, 40, 48, generator=torch.Generator().manual_seed(1))
    changed = latents.clone()
    changed[0, 5] += 1
    frames = (decoder.samples(latents) != decoder.samples(changed))[0].view(40, FRAME).any(1).nonzero()[:, 0]
    assert frames.min() == 5 and frames.max() <= 5 + decoder.reach
    assert decoder.reach <= 12 and frames.max() >= 5 + decoder.reach - 3, "much more is computed than is seen"
