"""Damaged checkpoints and odd prompts of all families: one named error that says what is wrong, before any engine starts."""

import json
import shutil
from importlib import import_module

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from stagevox.config.blueprint import Blueprint
from stagevox.errors import BadMediaError, BadParameterError, CheckpointError
from stagevox.models.checkpoint import MOST_LAYERS, blamed_on

FAMILIES = ("qwen2_5_omni", "qwen3_omni", "qwen3_tts")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for family in FAMILIES:
        write = import_module(f"stagevox.bench.checkpoints.{family}").write
        made[family] = write(tmp_path_factory.mktemp("whole") / family)
    return made


@pytest.fixture
def copy(folders, tmp_path):
    return lambda family: shutil.copytree(folders[family], tmp_path / family)


def change(path, value, *keys):
    config = json.loads(path.read_text(encoding="utf-8"))
    at = config
    for key in keys[:-1]:
        at = at[key]
    at[keys[-1]] = value
    path.write_text(json.dumps(config), encoding="utf-8")


LAYERS = {
    "qwen2_5_omni": ("thinker_config", "text_config", "num_hidden_layers"),
    "qwen3_omni": ("talker_config", "text_config", "num_hidden_layers"),
    "qwen3_tts": ("talker_config", "num_hidden_layers"),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("value", [MOST_LAYERS + 1, 10**30, -1, 1.5, "x", True, {}], ids=str)
def test_a_count_out_of_all_bounds(family, value, copy):
    """Not a loop that never ends: 10**30 layers would be made one by one."""
    folder = copy(family)
    change(folder / "config.json", value, *LAYERS[family])
    with pytest.raises(CheckpointError, match=rf"config\.json: {'.'.join(LAYERS[family])} is ") as caught:
        Blueprint.of(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "keys", "value"),
    [
        ("config.json", ("tts_pad_token_id",), "x"),
        ("config.json", ("tts_eos_token_id",), None),
        ("config.json", ("talker_config", "vocab_size"), "x"),
        ("generation_config.json", ("max_new_tokens",), "x"),
        ("generation_config.json", ("max_new_tokens",), -1),
        ("generation_config.json", ("top_k",), -3),
        ("speech_tokenizer/config.json", ("output_sample_rate",), "x"),
        ("speech_tokenizer/config.json", ("decoder_config", "num_hidden_layers"), 10**30),
        ("speech_tokenizer/config.json", ("decoder_config", "latent_dim"), -1),
    ],
    ids=lambda value: str(value)[-24:],
)
def test_a_tts_field_of_another_type_is_named(file, keys, value, copy):
    folder = copy("qwen3_tts")
    change(folder / file, value, *keys)
    with pytest.raises(CheckpointError, match=rf"{file}.*{keys[-1]}"):
        Blueprint.of(folder)


@pytest.mark.parametrize(
    ("family", "file", "keys", "value"),
    [
        ("qwen2_5_omni", "config.json", ("thinker_config", "text_config", "num_attention_heads"), 0),
        ("qwen3_tts", "config.json", ("talker_config", "spk_id"), 3),
        ("qwen3_tts", "speech_tokenizer/config.json", ("decoder_config", "upsample_rates"), 3),
    ],
    ids=lambda value: str(value)[-24:],
)
def test_values_that_no_check_foresaw_name_their_file(family, file, keys, value, copy):
    folder = copy(family)
    change(folder / file, value, *keys)
    with pytest.raises(CheckpointError, match=rf"{file} has values that can't be used: \w+Error"):
        Blueprint.of(folder)


def test_faults_of_the_code_are_not_blamed_on_a_file(tmp_path):
    with pytest.raises(AssertionError), blamed_on(tmp_path):
        raise AssertionError("ours")
    with pytest.raises(BadParameterError), blamed_on(tmp_path):
        raise BadParameterError("text", "named already")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn], ids=str)
def test_weights_that_are_no_floats(family, dtype, copy):
    folder = copy(family)
    shard = max(folder.glob("model-*.safetensors"))
    tensors = load_file(shard)
    name = min(tensors)
    save_file(tensors | {name: tensors[name].to(dtype)}, shard)
    with pytest.raises(CheckpointError, match=rf"{shard.name}: tensor {name} is of \w+ \(allowed: BF16, F16, F32, F64\)"):
        Blueprint.of(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_half_a_surrogate_pair(family, folders):
    blueprint = Blueprint.of(folders[family])
    field = "instruct" if family == "qwen3_tts" else "messages[0].content"
    other = {"text": "a", field: "b\udc00"} if family == "qwen3_tts" else {"messages": [{"role": "user", "content": "b\udc00"}]}
    for prompt, name in (({"text": "a\ud800b"}, "text"), (other, field)):
        with pytest.raises(BadParameterError, match="half a surrogate pair at 1") as caught:
            blueprint.admit("a", prompt, None)
        assert caught.value.field == name


@pytest.mark.parametrize("samples", [np.full(8000, 1e30, np.float32), np.full(8000, -1e300)], ids=["float32", "float64"])
def test_sounds_whose_power_is_no_float(samples, folders):
    with pytest.raises(BadMediaError, match=r"audios\[0\]: samples beyond 1e\+06"):
        Blueprint.of(folders["qwen3_omni"]).admit("a", {"text": "a", "audios": [samples]}, None)


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_omni"])
@pytest.mark.parametrize("rate", [8000, 44_100, 48_000.0, 15_999])
def test_sounds_of_another_rate(family, rate, folders):
    """They come to the Thinker at its own rate, each moment where it was."""
    time = np.arange(round(rate / 2)) / rate
    tone = (0.5 * np.sin(2 * np.pi * 440 * time)).astype(np.float32)
    request = Blueprint.of(folders[family]).admit("a", {"text": "a", "audios": [(tone, rate)]}, None)
    (heard,) = request.first.media["audio"]
    assert heard.dtype == np.float32 and abs(len(heard) - 8000) <= 1
    wanted = 0.5 * np.sin(2 * np.pi * 440 * np.arange(len(heard)) / 16_000)
    np.testing.assert_allclose(heard[400:-400], wanted[400:-400], atol=5e-3)
