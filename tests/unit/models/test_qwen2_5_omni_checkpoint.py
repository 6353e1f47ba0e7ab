"""A Qwen2.5-Omni folder that isn't whole is refused by file and key, and one of any size is loaded whole."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stagevox.bench.checkpoints.qwen2_5_omni import write
from stagevox.bench.checkpoints.weights import digest
from stagevox.errors import CheckpointError, UnknownModelError
from stagevox.models.qwen2_5_omni.bridge import read_rows
from stagevox.models.qwen2_5_omni.declared import BUFFER, declared
from stagevox.models.qwen2_5_omni.front_end import Qwen2_5OmniFrontEnd
from stagevox.models.qwen2_5_omni.topology import stages
from stagevox.models.registry import resolve_topology
from support.vllm_layers import one_rank

pytestmark = pytest.mark.filterwarnings("ignore")

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tiny_qwen2_5_omni, tmp_path):
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_qwen2_5_omni, tmp_path / "copy"))


def edit(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_shard(folder, name, change):
    """Rewrite the shard that has a tensor; the index keeps what it promised."""
    shard = folder / json.loads((folder / INDEX).read_text())["weight_map"][name]
    tensors = load_file(shard)
    change(tensors)
    save_file(tensors, shard)
    return shard.name


def refused(folder, error=CheckpointError):
    with pytest.raises(error) as caught:
        resolve_topology(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_whole_checkpoint_is_known_by_its_config(tiny_qwen2_5_omni):
    topology = resolve_topology(tiny_qwen2_5_omni)
    assert (topology.name, [stage.name for stage in topology.stages]) == ("qwen2_5_omni", ["thinker", "talker", "code2wav"])


def test_the_same_seed_makes_the_same_checkpoint(tiny_qwen2_5_omni, tmp_path):
    assert digest(write(tmp_path / "again")) == digest(tiny_qwen2_5_omni) != digest(write(tmp_path / "other", seed=1))


def test_a_missing_shard(folder):
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"{shard} is missing" in refused(folder)


def test_a_shard_cut_short(folder):
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    assert f"{shard} is no whole safetensors file" in refused(folder)


NAMES = (
    "thinker.model.layers.1.mlp.up_proj.weight",
    "thinker.audio_tower.proj.bias",
    "talker.codec_head.weight",
    "token2wav.code2wav_dit_model.proj_out.weight",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tensor(folder, name):
    shard = edit_shard(folder, name, lambda tensors: tensors.pop(name))
    assert f"{folder / shard} lacks tensor {name}" in refused(folder)
    edit(folder / INDEX, lambda index: index["weight_map"].pop(name))
    assert f"no file has tensor {name}" in refused(folder)


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_of_another_shape(folder, name):
    shard = edit_shard(folder, name, lambda tensors: tensors.update({name: torch.zeros(3, 5)}))
    assert f"{folder / shard}: tensor {name} has shape [3, 5], expected [" in refused(folder)


def test_a_tensor_too_many(folder):
    shard = edit_shard(folder, NAMES[0], lambda tensors: tensors.update({"talker.more": torch.zeros(1)}))
    assert f"{folder / shard}: tensor talker.more belongs to no part of the model" in refused(folder)


def test_an_unknown_model_type(folder):
    edit(folder / "config.json", lambda config: config.update(model_type="qwen9_omni"))
    says = refused(folder, UnknownModelError)
    assert "model_type 'qwen9_omni'" in says and "qwen2_5_omni" in says


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.pop("talker_config"), "config.json lacks talker_config"),
        (lambda c: c["talker_config"].pop("tts_codec_pad_token_id"), "config.json lacks talker_config.tts_codec_pad_token_id"),
        (lambda c: c["talker_config"].update(tts_codec_pad_token_id=9000), "codec_pad 9000 is no id of talker_config"),
        (lambda c: c["talker_config"].update(tts_text_end_token_id=10**6), "text_eos 1000000 is no id of thinker_config"),
        (lambda c: c["talker_config"].update(tts_codec_mask_token_id="x"), "talker_config.tts_codec_mask_token_id is no integer"),
        (lambda c: c["thinker_config"].update(text_config=[1]), "config.json is no config of this family"),
    ],
)
def test_a_config_that_does_not_fit(folder, change, says):
    edit(folder / "config.json", change)
    assert says in refused(folder)


def test_no_ends_of_a_text(folder):
    edit(folder / "generation_config.json", lambda config: config.pop("eos_token_id"))
    assert "generation_config.json lacks eos_token_id" in refused(folder)


def change_speakers(folder, change):
    path = folder / "spk_dict.pt"
    speakers = torch.load(path, weights_only=True)
    change(speakers)
    torch.save(speakers, path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s["Ethan"].pop("cond"), "voice Ethan lacks cond"),
        (lambda s: s["Chelsie"].pop("bos_token"), "voice Chelsie lacks bos_token"),
        (lambda s: s["Ethan"].update(ref_mel=torch.zeros(1, 4, 5)), "ref_mel of voice Ethan has shape [1, 4, 5]"),
        (lambda s: s["Ethan"].update(cond=torch.zeros(1, 5)), "cond of voice Ethan has shape [1, 5], expected [1, 24]"),
        (lambda s: s["Ethan"].update(cond=torch.full((1, 24), torch.nan)), "cond of voice Ethan is no tensor of finite"),
        (lambda s: s["Ethan"].update(bos_token=896), "bos_token of voice Ethan is 896, no id of the Thinker"),
        (dict.clear, "holds no voices"),
    ],
)
def test_a_speaker_file_that_lacks_something(folder, change, says):
    change_speakers(folder, change)
    assert f"{folder / 'spk_dict.pt'}" in (found := refused(folder)) and says in found


def test_a_speaker_file_is_never_unpickled(folder, tmp_path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"Ethan": Evil()}, folder / "spk_dict.pt")
    assert "spk_dict.pt can't be read" in refused(folder)
    assert not (tmp_path / "ran").exists()
    (folder / "spk_dict.pt").unlink()
    assert "spk_dict.pt is missing" in refused(folder)


def test_a_tokenizer_without_the_specials(folder):
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<|AUDIO|>", "<|SOUND|>"))
    edit(folder / "tokenizer_config.json", lambda c: (c.pop("audio_token"), c["extra_special_tokens"].pop("audio_token")))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json lacks the token <\|AUDIO\|>"):
        Qwen2_5OmniFrontEnd(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Qwen2_5OmniFrontEnd(folder)


# real sizes


@pytest.fixture(scope="module")
def reference():
    """Names and shapes of the reference at its own default sizes; nothing is allocated."""
    from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

    config = Qwen2_5OmniConfig()
    with torch.device("meta"):
        model = Qwen2_5OmniForConditionalGeneration._from_config(config)
    return config, {name: tensor.shape for name, tensor in model.state_dict().items()}


def test_every_tensor_of_the_reference_is_declared(reference):
    config, shapes = reference
    assert declared(config) == {name: tuple(shape) for name, shape in shapes.items() if name != BUFFER}
    assert len(shapes) > 2400


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_every_tensor_of_the_reference_has_its_place(reference, tmp_path, stage):
    """At the reference's default sizes, on no device: vLLM's own loaders check each shape, and no parameter is left without one."""
    from stagevox.config.objects import load_attribute
    from stagevox.models.registry import ARCHITECTURES
    from stagevox.stage.vllm_config import make_config

    config, shapes = reference
    raw = config.to_dict()
    raw["thinker_config"]["text_config"]["tie_word_embeddings"] = False
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645]}))
    spec = stages(tmp_path, config)[stage]
    small = {"max_model_len": 512, "dtype": "float32", "kv_cache_memory_bytes": 1 << 30, "skip_tokenizer_init": True}
    vllm_config = make_config(spec, small)
    with one_rank(vllm_config), torch.device("meta"):
        model = load_attribute(ARCHITECTURES[spec.architecture])(vllm_config=vllm_config)
        loaded = model.load_weights((name, torch.empty(shape)) for name, shape in [*shapes.items(), (BUFFER, (32,))])
    assert loaded == {name for name, _ in model.named_parameters()}
    assert len(loaded) > 200


def test_rows_of_a_tensor(tiny_qwen2_5_omni):
    name = "thinker.model.embed_tokens.weight"
    shard = tiny_qwen2_5_omni / json.loads((tiny_qwen2_5_omni / INDEX).read_text())["weight_map"][name]
    whole = load_file(shard)[name]
    for row, found in zip([5, 0, 895], read_rows(tiny_qwen2_5_omni, name, [5, 0, 895]), strict=True):
        assert torch.equal(found, whole[row : row + 1])
