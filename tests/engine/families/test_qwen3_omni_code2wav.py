"""Qwen3-Omni's vocoder in windows: the reference's samples where it has them, and those that it loses at borders."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Qwen3OmniMoeConfig

from oracles.qwen3_omni import Reference
from stagevox.connectors.base import Chunk
from stagevox.contract import CODES, NUM_COMPUTED_TOKENS, SAMPLE_RATE, WAVEFORM
from stagevox.errors import ConfigError, ContractError, MissingStateError
from stagevox.models.checkpoint import read_tensors
from stagevox.models.qwen3_omni.bridge import Code2WavInput
from stagevox.models.qwen3_omni.code2wav import Qwen3OmniCode2Wav, samples_of
from stagevox.models.windows import CODES_STATE, WINDOW
from stagevox.stage.payload import StageRequest

FAMILY = "qwen3_omni"
TOLERANCE = 1e-5
"""Other shapes add up in another order: about 1e-6 here, of samples up to 0.9."""

UP, DELAY = 1920, 555

pytestmark = pytest.mark.covers("EX-9")


@pytest.fixture(scope="module")
def reference(checkpoint):
    return Reference(checkpoint(FAMILY)).model.code2wav


@pytest.fixture(scope="module")
def net(checkpoint):
    from safetensors.torch import load_file

    folder = checkpoint(FAMILY)
    config = Qwen3OmniMoeConfig.from_pretrained(folder).code2wav_config
    made = Qwen3OmniCode2Wav(vllm_config=SimpleNamespace(model_config=SimpleNamespace(hf_config=config)))
    files = {entry.file for entry in read_tensors(folder).values()}
    loaded = made.load_weights(pair for file in sorted(files) for pair in load_file(file).items())
    assert loaded == {name for name, _ in made.named_parameters()}
    return made


def frames(count, seed=3):
    return torch.randint(0, 256, (count, 8), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def decode(net, codes, cuts, window):
    """The samples of ``codes`` in steps that end at ``cuts``."""
    parts, start = [], 0
    for end in cuts:
        state = {CODES_STATE: codes[:end], WINDOW: window, NUM_COMPUTED_TOKENS: start}
        spans = [(0, end - start)]
        made = net(None, torch.arange(end - start), model_intermediate_buffer=[state], request_token_spans=spans)
        (part,), (rate,) = made.multimodal_outputs[WAVEFORM], made.multimodal_outputs[SAMPLE_RATE]
        assert rate == 24_000
        parts.append(part.tensor)
        start = end
    return torch.cat(parts)


def test_length(net):
    assert (net.up, net.delay) == (UP, DELAY)
    for count in (1, 2, 9, 10, 11, 47):
        made = decode(net, frames(count), [count], (10, 25))
        assert len(made) == count * UP - DELAY == samples_of(net.code2wav.config, count)
    assert samples_of(net.code2wav.config, 0) == 0


def test_one_window_is_the_references_whole_waveform(net, reference):
    codes = frames(40)
    with torch.inference_mode():
        whole = reference.chunked_decode(codes.T[None], 300, 25).reshape(-1)
    torch.testing.assert_close(decode(net, codes, [40], (300, 25)), whole, atol=TOLERANCE, rtol=0)


WHOLE, BORDERS, ACROSS, SINGLE = [47], [10, 20, 30, 40, 47], [1, 2, 9, 21, 46, 47], list(range(1, 48))


@pytest.mark.parametrize(
    ("window", "cuts"),
    [((10, 25), WHOLE), ((10, 25), BORDERS), ((10, 3), ACROSS), ((10, 3), SINGLE), ((7, 1), BORDERS), ((300, 25), ACROSS)],
)
def test_windows_are_the_references_however_frames_come(net, reference, window, cuts):
    """Chunk by chunk: what the reference returns of a chunk, and before it the samples which it computed and threw away."""
    codes = frames(47)
    made = decode(net, codes, cuts, window)
    size, context = window
    covered = 0
    for start in range(0, 47, size):
        end = min(start + size, 47)
        first = max(0, start - context)
        with torch.inference_mode():
            alone = reference(codes[first:end].T[None]).reshape(-1)
        begin = max(0, start * UP - DELAY)
        torch.testing.assert_close(
            made[begin : end * UP - DELAY], alone[begin - first * UP :], atol=TOLERANCE, rtol=0, msg=f"chunk {start}"
        )
        covered += end * UP - DELAY - begin
    assert covered == len(made) == 47 * UP - DELAY
    with torch.inference_mode():
        gapped = reference.chunked_decode(codes.T[None], size, context)
    assert gapped.shape[-1] == 47 * UP - DELAY * -(-47 // size)  # the reference lacks some at each border


def test_no_click_at_a_border(net):
    """A window's border is no steeper than the waveform is anyway."""
    made = decode(net, frames(60), [60], (10, 25))
    steps = made.diff().abs()
    borders = torch.tensor([start * UP - DELAY - 1 for start in range(10, 60, 10)])
    assert steps[borders].max() < steps.quantile(0.999)


def test_requests_of_one_step_keep_apart(net):
    """Unequal spans, one of them across a window's border, in one call: each has its own samples (EX-15)."""
    asked = [(frames(33, 1), 5, 33), (frames(12, 2), 11, 12), (frames(4, 3), 0, 4)]
    states, spans, at = [], [], 0
    for codes, start, end in asked:
        states.append({CODES_STATE: codes, WINDOW: (10, 25), NUM_COMPUTED_TOKENS: start})
        spans.append((at, at + end - start))
        at += end - start
    with torch.inference_mode():
        made = net(None, torch.arange(at), model_intermediate_buffer=states, request_token_spans=spans)
    for (codes, start, end), samples in zip(asked, made.multimodal_outputs[WAVEFORM], strict=True):
        whole = decode(net, codes, [len(codes)], (10, 25))
        wanted = whole[max(0, start * UP - DELAY) : end * UP - DELAY]
        torch.testing.assert_close(samples.tensor, wanted, atol=TOLERANCE, rtol=0)


def test_the_golden_chunks_are_there(net, golden):
    facts = golden(FAMILY).facts
    window = facts["chunk"], facts["context"]
    for name in ("goes_on", "long"):
        case = golden(FAMILY).cases[name]
        made = decode(net, torch.tensor(case["codes"]), [len(case["codes"])], window)
        kept = golden(FAMILY).waveforms[f"{name}.chunked"]
        places = []
        for start in range(0, len(case["codes"]), facts["chunk"]):
            end = min(start + facts["chunk"], len(case["codes"]))
            places += range(start * UP, end * UP - DELAY)
        assert len(places) == case["chunked_samples"]
        np.testing.assert_allclose(made[places[:: facts["stride"]]], kept, atol=TOLERANCE, rtol=0)


class TestInput:
    def request(self):
        return StageRequest("a", None)

    def test_frames_become_positions(self, checkpoint):
        adapter = Code2WavInput(checkpoint(FAMILY))
        given = [
            adapter.accept(self.request(), Chunk("a", 0, False, {CODES: frames(3)})),
            adapter.accept(self.request(), Chunk("a", 1, True, {CODES: frames(2)})),
        ]
        assert [len(one.prompt_token_ids) for one in given] == [3, 2]
        assert [one.payload[CODES_STATE].first for one in given] == [0, 3]
        assert [one.end for one in given] == [False, True]

    def test_no_frames_at_all(self, checkpoint):
        given = Code2WavInput(checkpoint(FAMILY)).accept(self.request(), Chunk("a", 0, True, {}))
        assert given.end and not given.prompt_token_ids and not given.payload

    @pytest.mark.parametrize("bad", [torch.full((2, 8), 256), torch.full((2, 8), -1), torch.zeros(2, 7).long()])
    def test_codes_out_of_range_reach_no_embedding(self, checkpoint, bad):
        with pytest.raises(ContractError, match="holds no codec frames"):
            Code2WavInput(checkpoint(FAMILY)).accept(self.request(), Chunk("a", 0, True, {CODES: bad}))

    def test_a_lost_chunk(self, checkpoint):
        with pytest.raises(ContractError, match="chunk 1 of a came, 0 was next"):
            Code2WavInput(checkpoint(FAMILY)).accept(self.request(), Chunk("a", 1, True, {CODES: frames(2)}))

    def test_a_window_needs_a_frame_before_it(self, checkpoint):
        with pytest.raises(ConfigError, match="at least 1"):
            Code2WavInput(checkpoint(FAMILY), left_context=0)


def test_missing_state(net):
    with pytest.raises(MissingStateError, match="codes was never stored"):
        net(None, torch.arange(1), model_intermediate_buffer=[{NUM_COMPUTED_TOKENS: 0}], request_token_spans=[(0, 1)])
    state = {CODES_STATE: frames(1), WINDOW: (10, 25), NUM_COMPUTED_TOKENS: 0}
    with pytest.raises(ContractError, match="positions up to 2 are scheduled"):
        net(None, torch.arange(2), model_intermediate_buffer=[state], request_token_spans=[(0, 2)])
