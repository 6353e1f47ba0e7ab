"""Tiny checkpoints and the engines over them, made once a session; every test must leave its engines idle."""

import json
from unittest.mock import patch

import pytest

from stagevox.config.env import prepare_inline_process

prepare_inline_process()

import torch  # noqa: E402
from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: E402

from stagevox.contract import StageExecutionType  # noqa: E402
from tests.engine.stage.harness import Harness, spec_of  # noqa: E402
from tests.engine.stage.oracle import Oracle  # noqa: E402
from tests.engine.stage.toy_models import HIDDEN, MODELS, register_toys  # noqa: E402

VOCABULARY = 64


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """A folder for each toy model, all with the same weights."""
    folder = tmp_path_factory.mktemp("toys")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
    found = {}
    for name in MODELS:
        found[name] = folder / name
        model.save_pretrained(found[name])
        path = found[name] / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": [name]}))
    register_toys()
    return found


@pytest.fixture(scope="session")
def oracle(checkpoints):
    return Oracle(checkpoints["Qwen2ForCausalLM"])


@pytest.fixture(scope="session")
def _engines(checkpoints):
    made = {}

    def get(model, overrides, kwargs):
        key = (model, json.dumps(overrides, sort_keys=True), json.dumps(kwargs, sort_keys=True))
        if key not in made or made[key] in get.spoilt:
            kind = StageExecutionType.GENERATION if model.endswith("Vocoder") else StageExecutionType.AR
            made[key] = Harness(spec_of(checkpoints[model], kind=kind, **kwargs), overrides)
        return made[key]

    get.spoilt = []
    yield get
    with patch("gc.collect"):  # every engine's shutdown collects, half a second each on the heap of a session
        for harness in made.values():
            harness.engine.close()


@pytest.fixture
def engine(_engines):
    """``engine(model, **overrides)``: a harness over an engine that this session already has or starts now.

    An engine that a test leaves busy or broken is not lent to the next one.
    """
    used = []

    def get(model, *, spec=None, **overrides):
        harness = _engines(model, overrides, spec or {})
        harness.begin()
        used.append(harness)
        return harness

    yield get
    for harness in used:
        _engines.spoilt.append(harness)
        harness.run().assert_idle()
        _engines.spoilt.remove(harness)


@pytest.fixture(scope="session")
def prompt():
    """``prompt(n, seed)``: n token ids."""
    return lambda count, seed=0: torch.randint(1, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="session")
def rows():
    """``rows(seed, n)``: conditioning ``[n, H]``."""
    return lambda seed, count=7: torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(100 + seed)) * 0.1
