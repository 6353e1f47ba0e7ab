"""What a Qwen3-TTS checkpoint holds: the reference's names and shapes, each with its place in ours; and damaged ones."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from stagevox.config.blueprint import Blueprint
from stagevox.errors import CheckpointError, UnknownModelError
from stagevox.models.qwen3_tts.code2wav import Qwen3TTSCode2Wav
from stagevox.models.qwen3_tts.config import Qwen3TTSTalkerConfig, Qwen3TTSTokenizerConfig
from stagevox.models.qwen3_tts.layout import ENCODING, talker_shapes, vocoder_shapes
from stagevox.models.qwen3_tts.talker import Qwen3TTSTalkerForConditionalGeneration
from stagevox.models.qwen3_tts.topology import topology
from stagevox.stage.vllm_config import make_config
from support.qwen3_tts import GOLDEN, checkpoint, golden, prompt
from support.vllm_layers import one_rank

PUBLISHED = json.loads((GOLDEN / "parameters.json").read_text(encoding="utf-8"))
"""Of the reference's full-size default configs, as the reference itself makes them."""


def shapes(name):
    return {key: tuple(shape) for key, shape in PUBLISHED[name]["tensors"].items()}


def without_speaker_encoder(found):
    """The reference makes it for models that clone voices only; a CustomVoice model has none."""
    return {key: shape for key, shape in found.items() if not key.startswith("speaker_encoder.")}


@pytest.mark.parametrize("name", ["talker", "wide talker"])
def test_the_layout_is_the_references(name):
    assert talker_shapes(PUBLISHED[name]["config"]) == without_speaker_encoder(shapes(name))
    assert ("small_to_mtp_projection" in str(shapes(name))) == (name == "wide talker")


def test_the_layout_of_the_decoder_is_the_references():
    assert vocoder_shapes(PUBLISHED["decoder"]["config"]) == shapes("decoder")


@pytest.mark.parametrize("name", ["talker", "wide talker"])
def test_every_tensor_of_a_full_size_talker_has_its_place(name):
    config = make_config(topology(checkpoint()).stages[0], {"max_model_len": 64})
    config.model_config.hf_config = Qwen3TTSTalkerConfig(**PUBLISHED[name]["config"])
    with one_rank(config), torch.device("meta"):
        model = Qwen3TTSTalkerForConditionalGeneration(vllm_config=config)
        given = {key: torch.empty(shape) for key, shape in without_speaker_encoder(shapes(name)).items()}
        loaded = model.load_weights(given.items())
        assert loaded == {key for key, _ in model.named_parameters()}
        stacked = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj"}
        assert sum(tensor.numel() for tensor in given.values()) == sum(part.numel() for part in model.parameters())
        assert any(part in key for key in given for part in stacked)
        with pytest.raises(ValueError, match="no module or parameter named 'other'"):
            model.load_weights([("talker.other.weight", torch.empty(1))])


def test_every_tensor_of_a_full_size_decoder_has_its_place():
    config = make_config(topology(checkpoint()).stages[1], {})
    config.model_config.hf_config = Qwen3TTSTokenizerConfig(decoder_config=PUBLISHED["decoder"]["config"])
    with torch.device("meta"):
        model = Qwen3TTSCode2Wav(vllm_config=config)
        given = {key: torch.empty(shape) for key, shape in shapes("decoder").items()}
        assert model.load_weights(given.items()) == {key for key, _ in model.named_parameters()}
        unread = {key for key in given if key.startswith(ENCODING)}
        assert set(given) - unread == {key for key, _ in model.named_parameters()}
        assert unread == {f"decoder.quantizer.rvq_{part}.input_proj.weight" for part in ("first", "rest")}
        key, *_ = given
        with pytest.raises(CheckpointError, match=f"missing tensors: .*{key}"):
            model.load_weights(list(given.items())[1:])
        with pytest.raises(CheckpointError, match="tensor other"):
            model.load_weights([("other", torch.empty(1))])


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(checkpoint(), tmp_path / "checkpoint")


def edit(path, change):
    value = json.loads(path.read_text(encoding="utf-8"))
    change(value)
    path.write_text(json.dumps(value), encoding="utf-8")


def rewrite(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def shard_of(folder, name):
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]


def lose_tensor(folder):
    name = "talker.codec_head.weight"
    rewrite(folder / shard_of(folder, name), lambda tensors: tensors.pop(name))


def lose_everywhere(folder):
    lose_tensor(folder)
    edit(folder / "model.safetensors.index.json", lambda index: index["weight_map"].pop("talker.codec_head.weight"))


def add_tensor(folder):
    name = "talker.codec_head.weight"
    rewrite(folder / shard_of(folder, name), lambda tensors: tensors.update(surplus=torch.zeros(1)))


def reshape(folder):
    name = "talker.text_projection.linear_fc2.bias"
    rewrite(folder / shard_of(folder, name), lambda tensors: tensors.update({name: torch.zeros(3)}))


def cut_shard(folder):
    path = folder / "model-00002-of-00004.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def lose_special(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = folder / name
        path.write_text(path.read_text(encoding="utf-8").replace("<tts_text_bos>", "<tts_text_xxx>"), encoding="utf-8")


def speech(name, change):
    return lambda folder: edit(folder / "speech_tokenizer" / name, change)


def config(change):
    return lambda folder: edit(folder / "config.json", change)


def talker(change):
    return config(lambda value: change(value["talker_config"]))


FAULTS = {
    "a missing shard": (
        lambda folder: (folder / "model-00003-of-00004.safetensors").unlink(),
        r"model-00003-of-00004.safetensors is missing",
    ),
    "a cut shard": (cut_shard, r"model-00002-of-00004.safetensors is no whole safetensors file"),
    "a tensor that its shard lacks": (lose_tensor, r"model-0000\d-of-00004.safetensors lacks tensor talker.codec_head.weight"),
    "a missing tensor": (lose_everywhere, r"no file has tensor talker.codec_head.weight"),
    "an extra tensor": (add_tensor, r"model-0000\d-of-00004.safetensors: tensor surplus belongs to no part"),
    "a wrong shape": (reshape, r"safetensors: tensor talker.text_projection.linear_fc2.bias has shape \[3\], expected \[64\]"),
    "no speech tokenizer": (
        lambda folder: shutil.rmtree(folder / "speech_tokenizer"),
        r"speech_tokenizer.config.json can't be read",
    ),
    "a vocoder without a tensor": (
        lambda folder: rewrite(
            folder / "speech_tokenizer" / "model.safetensors", lambda tensors: tensors.pop("decoder.pre_conv.conv.bias")
        ),
        r"speech_tokenizer: no file has tensor decoder.pre_conv.conv.bias",
    ),
    "other groups in the vocoder": (
        speech("config.json", lambda value: value["decoder_config"].update(num_quantizers=8)),
        r"speech_tokenizer.config.json: decoder_config.num_quantizers is 8, the talker makes 16 groups",
    ),
    "no speakers": (talker(lambda value: value.pop("spk_id")), r"config.json lacks talker_config.spk_id"),
    "an empty list of speakers": (
        talker(lambda value: value.update(spk_id={})),
        r"config.json: talker_config.spk_id names no speaker",
    ),
    "a speaker outside the vocabulary": (
        talker(lambda value: value["spk_id"].update(ryan=99999)),
        r"config.json: talker_config.spk_id.ryan is 99999, outside the vocabulary",
    ),
    "a language that is no id": (
        talker(lambda value: value["codec_language_id"].update(german="x")),
        r"config.json: talker_config.codec_language_id.german is 'x', outside",
    ),
    "an end outside the vocabulary": (
        talker(lambda value: value.update(codec_eos_token_id=-1)),
        r"config.json: talker_config.codec_eos_token_id is -1, outside",
    ),
    "a speaker without its dialect": (
        talker(lambda value: value["spk_is_dialect"].pop("eric")),
        r"config.json lacks spk_is_dialect.eric",
    ),
    "a dialect that is no language": (
        talker(lambda value: value["codec_language_id"].pop("beijing_dialect")),
        r"config.json: talker_config.codec_language_id lacks beijing_dialect, which dylan speaks",
    ),
    "no generation config": (
        lambda folder: (folder / "generation_config.json").unlink(),
        r"generation_config.json can't be read",
    ),
    "a tokenizer without a mark": (
        lose_special,
        r"checkpoint: the tokenizer lacks <tts_text_bos>, the config's tts_bos_token_id",
    ),
    "a mark of another id": (
        config(lambda value: value.update(tts_eos_token_id=3)),
        r"config.json: tts_eos_token_id is 3, the tokenizer has <tts_text_eod> at 670",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_checkpoint_is_refused_with_file_and_key(folder, fault):
    damage, message = FAULTS[fault]
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        Blueprint.of(str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen9_tts"}, r"config.json has model_type 'qwen9_tts' .allowed: .*qwen3_tts"),
        ({"tts_model_type": "base"}, r"config.json has tts_model_type 'base' .allowed: custom_voice"),
        (
            {"tokenizer_type": "qwen3_tts_tokenizer_25hz"},
            r"tokenizer_type 'qwen3_tts_tokenizer_25hz' .allowed: qwen3_tts_tokenizer_12hz",
        ),
    ],
)
def test_another_kind_of_model_is_refused(folder, change, message):
    edit(folder / "config.json", lambda value: value.update(change))
    with pytest.raises(UnknownModelError, match=message):
        Blueprint.of(str(folder))


def test_a_tokenizer_of_plain_files_is_read_too(folder):
    """Vocabulary and merges, with the special tokens in the tokenizer's config."""
    from stagevox.bench.checkpoints.qwen3_tts import SPECIALS
    from stagevox.bench.checkpoints.tokenizer import BASE

    (folder / "tokenizer.json").unlink()
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    tokens = {str(BASE + index): {"content": token, **plain} for index, token in enumerate(SPECIALS)}
    edit(folder / "tokenizer_config.json", lambda value: value.update(added_tokens_decoder=tokens))
    ours, other = (Blueprint.of(str(place)).front_end for place in (checkpoint(), folder))
    for name in golden()["cases"]:
        assert other.admit("a", prompt(name)).cache_salt == ours.admit("a", prompt(name)).cache_salt


def test_a_small_model_follows_no_instructions(folder):
    edit(folder / "config.json", lambda value: value.update(tts_model_size="0b6"))
    front_end = Blueprint.of(str(folder)).front_end
    assert front_end.admit("a", {"text": "hello", "instruct": ""}).prompt_token_ids
    with pytest.raises(Exception, match="instruct: a model of size '0b6' follows no instructions"):
        front_end.admit("a", {"text": "hello", "instruct": "slowly"})


def test_a_checkpoint_depends_on_its_seed_alone(tmp_path):
    from stagevox.bench.checkpoints.qwen3_tts import write
    from stagevox.bench.checkpoints.weights import digest

    again, other = write(tmp_path / "again"), write(tmp_path / "other", seed=1)
    assert digest(again) == digest(checkpoint()) != digest(other)
