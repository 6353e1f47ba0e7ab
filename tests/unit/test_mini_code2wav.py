"""Code2Wav against the oracle, for every way of cutting and batching the frames. Tolerance: 1e-5 of full scale."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from mini_reference import TinyOmni
from safetensors.torch import load_file

from stagevox.contract import NUM_COMPUTED_TOKENS, SAMPLE_RATE, WAVEFORM
from stagevox.errors import CheckpointError, ContractError, MissingStateError
from stagevox.models.mini.code2wav import MiniCode2Wav, Span
from stagevox.models.mini.config import MiniCode2WavConfig
from stagevox.models.mini.pieces import WEIGHTS as packaged

WEIGHTS = packaged / "code2wav"
TOLERANCE = 1e-5
SAMPLES = 640


@pytest.fixture(scope="module")
def oracle():
    return TinyOmni()


def _model() -> MiniCode2Wav:
    config = MiniCode2WavConfig.from_pretrained(WEIGHTS)
    model = MiniCode2Wav(vllm_config=SimpleNamespace(model_config=SimpleNamespace(hf_config=config)))
    model.load_weights(load_file(WEIGHTS / "model.safetensors").items())
    return model


@pytest.fixture(scope="module")
def model():
    return _model()


def random_codes(frames: int, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randint(0, size, (frames,), generator=g) for size in (512, 256, 256, 256)], 1)


def axis(model: MiniCode2Wav, codes: torch.Tensor) -> torch.Tensor:
    """A request's whole position axis: warm-up silence, frames, one silence frame."""
    silence = torch.tensor([model.config.silence_codes])
    return torch.cat([silence.expand(model.config.warmup_codes, -1), codes, silence])


def step(model: MiniCode2Wav, *rows: tuple[torch.Tensor, int, int]) -> list[torch.Tensor]:
    """One forward over ``(codes, computed, span)`` a request."""
    states = [{"codes": codes, NUM_COMPUTED_TOKENS: computed} for codes, computed, _ in rows]
    ends = torch.tensor([span for _, _, span in rows]).cumsum(0).tolist()
    spans = list(zip([0, *ends], ends, strict=False))
    ids = torch.zeros(ends[-1], dtype=torch.long)
    out = model(ids, ids, model_intermediate_buffer=states, request_token_spans=spans)
    assert out.text_hidden_states.shape == (ends[-1], 1)
    assert out.multimodal_outputs[SAMPLE_RATE] == [16000] * len(rows)
    return [getattr(samples, "tensor", samples) for samples in out.multimodal_outputs[WAVEFORM]]


def in_spans(model: MiniCode2Wav, codes: torch.Tensor, spans: list[int], *, grow: bool) -> torch.Tensor:
    """Decode an axis span by span; with ``grow`` the state never holds more than the frames so far."""
    parts, start = [], 0
    for span in spans:
        known = codes[: start + span] if grow else codes
        parts += step(model, (known, start, span))
        start += span
    assert start == len(codes)
    return torch.cat(parts)


@pytest.mark.covers("EX-9")
@pytest.mark.parametrize("frames", [1, 2, 8, 37, 170])
def test_single_shot_equals_the_oracle(model, oracle, frames):
    codes = random_codes(frames, frames)
    got = step(model, (axis(model, codes), 0, frames + 9))[0]
    want = oracle.code2wav(codes)
    assert got.shape == want.shape == (frames * SAMPLES,)
    assert (got - want).abs().max() < TOLERANCE


@pytest.mark.covers("EX-9")
@pytest.mark.parametrize("chunk", [1, 4, 7, 25])
def test_chunks_equal_a_single_shot(model, oracle, chunk):
    codes = random_codes(61, 3)
    whole = axis(model, codes)
    spans = [chunk] * (len(whole) // chunk) + ([len(whole) % chunk] if len(whole) % chunk else [])
    got = in_spans(model, whole, spans, grow=True)
    assert got.shape == (61 * SAMPLES,)
    assert (got - oracle.code2wav(codes)).abs().max() < TOLERANCE


@pytest.mark.covers("EX-9")
@pytest.mark.parametrize("seed", range(6))
def test_any_split_gives_the_same_samples(model, oracle, seed):
    rng = random.Random(seed)
    frames = rng.randint(1, 90)
    codes = random_codes(frames, seed)
    whole, spans = axis(model, codes), []
    while sum(spans) < len(whole):
        spans.append(min(rng.choice([1, 2, 3, 5, 9, 16, 40]), len(whole) - sum(spans)))
    got = in_spans(model, whole, spans, grow=rng.random() < 0.5)
    assert (got - oracle.code2wav(codes)).abs().max() < TOLERANCE


@pytest.mark.covers("EX-9", "EX-4")
def test_a_batch_of_unequal_spans_equals_each_request_alone(model, oracle):
    frames = [5, 31, 64, 12, 90]
    codes = [random_codes(n, 40 + n) for n in frames]
    wholes = [axis(model, c) for c in codes]
    parts: list[list[torch.Tensor]] = [[] for _ in frames]
    starts, rng = [0] * len(frames), random.Random(1)
    while live := [i for i, whole in enumerate(wholes) if starts[i] < len(whole)]:
        rng.shuffle(live)
        rows = [(wholes[i], starts[i], min(rng.choice([1, 3, 10, 33]), len(wholes[i]) - starts[i])) for i in live]
        for i, (_, _, span), samples in zip(live, rows, step(model, *rows), strict=True):
            parts[i].append(samples)
            starts[i] += span
    for c, pieces in zip(codes, parts, strict=True):
        want = oracle.code2wav(c)
        got = torch.cat(pieces)
        assert got.shape == want.shape
        assert (got - want).abs().max() < TOLERANCE


@pytest.mark.covers("EX-9")
def test_the_first_nine_positions_yield_no_samples(model):
    whole = axis(model, random_codes(20, 0))
    lengths = [len(step(model, (whole, p, 1))[0]) for p in range(len(whole))]
    assert lengths == [0] * 9 + [SAMPLES] * 20


@pytest.mark.covers("EX-9")
def test_samples_depend_on_exactly_fifteen_frames_before(model):
    net, whole = model.code2wav, random_codes(60, 9)
    assert net.context == 15
    want = net([Span(40, 45, whole)])[0]
    for distance, same in ((net.context, False), (net.context + 1, True)):
        changed = whole.clone()
        changed[40 - distance] = (changed[40 - distance] + 7) % 256
        assert torch.equal(net([Span(40, 45, changed)])[0], want) is same


@pytest.mark.covers("EX-9")
def test_left_context_is_capped_by_what_was_computed(model):
    assert [model.left_context_size(a) for a in (0, 3, 16, 100)] == [0, 3, 16, 16]
    assert model.left_context_size(100) >= model.code2wav.context


def test_codes_that_are_missing_raise(model):
    with pytest.raises(MissingStateError, match="codes"):
        model._span({NUM_COMPUTED_TOKENS: 0}, 3)
    with pytest.raises(ContractError, match="12"):
        step(model, (random_codes(11, 0), 0, 12))


@pytest.mark.parametrize("fault", ["missing", "extra", "misshapen"])
def test_a_checkpoint_that_does_not_fit_is_refused_by_key(fault):
    tensors = load_file(WEIGHTS / "model.safetensors")
    key = "code2wav.post.1.fc1.weight"
    if fault == "missing":
        del tensors[key]
    elif fault == "extra":
        key = "code2wav.post.9.fc1.weight"
        tensors[key] = torch.zeros(1)
    else:
        tensors[key] = tensors[key][:-1]
    config = MiniCode2WavConfig.from_pretrained(WEIGHTS)
    fresh = MiniCode2Wav(vllm_config=SimpleNamespace(model_config=SimpleNamespace(hf_config=config)))
    with pytest.raises(CheckpointError, match=key.replace(".", r"\.")):
        fresh.load_weights(tensors.items())


@pytest.mark.parametrize("changed", [{"left_context_codes": 14}, {"delay_samples": 600}, {"upsample": 5}], ids=str)
def test_a_config_that_cannot_be_right_is_refused(changed):
    config = MiniCode2WavConfig.from_pretrained(WEIGHTS, **changed)
    with pytest.raises(CheckpointError, match="code2wav"):
        MiniCode2Wav(vllm_config=SimpleNamespace(model_config=SimpleNamespace(hf_config=config)))
