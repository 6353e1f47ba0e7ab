"""What a Qwen3-Omni checkpoint must hold: full-size models map tensor by tensor, and a damaged folder is refused by name."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3OmniMoeConfig

from stagevox.config.blueprint import Blueprint
from stagevox.config.topology import StageSpec
from stagevox.contract import StageExecutionType
from stagevox.errors import CheckpointError, UnknownModelError
from stagevox.models.qwen3_omni.code2wav import Qwen3OmniCode2Wav
from stagevox.models.qwen3_omni.layout import tensor_shapes
from stagevox.models.qwen3_omni.talker import THINKER_TABLE, Qwen3OmniTalker
from stagevox.models.qwen3_omni.thinker import Qwen3OmniThinker
from stagevox.stage.vllm_config import make_config
from support.vllm_layers import one_rank

FAMILY = "qwen3_omni"

# The library's sizes, with what its defaults lack to be a model: ids inside the vocabularies, heads of an even size.
ROPE = {"rope_type": "default", "rope_theta": 1_000_000, "mrope_interleaved": True}
FULL_SIZE = {
    "thinker_config": {
        "text_config": {
            "vocab_size": 152_064,
            "tie_word_embeddings": False,
            "num_attention_heads": 32,
            "head_dim": 128,
            "rope_parameters": {**ROPE, "mrope_section": [24, 20, 20]},
        },
        "audio_config": {"output_dim": 2048},
        "vision_config": {"out_hidden_size": 2048, "image_size": 768, "apply_vit_abs_pos_embed": True},
    },
    "talker_config": {
        "text_config": {
            "shared_expert_intermediate_size": 768,
            "head_dim": 64,
            "rope_parameters": {**ROPE, "mrope_section": [12, 10, 10]},
        },
        "code_predictor_config": {"num_code_groups": 16},
        "num_code_groups": 16,
        "spatial_merge_size": 2,
        "codec_pad_id": 2148,
        "codec_bos_id": 2149,
        "codec_eos_token_id": 2150,
        "codec_nothink_id": 2155,
        "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157,
        "speaker_id": {"Ethan": 2302},
    },
}
STAGES = [
    ("thinker", Qwen3OmniThinker, None),
    ("talker", Qwen3OmniTalker, "talker_config"),
    ("code2wav", Qwen3OmniCode2Wav, "code2wav_config"),
]


@pytest.fixture(scope="module")
def full_size(tmp_path_factory):
    """A folder with a configuration and nothing else; names and shapes of what should be in it."""
    folder = tmp_path_factory.mktemp("full")
    config = Qwen3OmniMoeConfig(**FULL_SIZE)
    config.architectures = ["Qwen3OmniMoeForConditionalGeneration"]
    config.save_pretrained(folder)
    return folder, tensor_shapes(config)


@pytest.mark.parametrize(("stage", "model_class", "part"), STAGES, ids=[name for name, *_ in STAGES])
def test_every_tensor_of_the_reference_is_one_of_ours(full_size, stage, model_class, part):
    folder, shapes = full_size
    kind = StageExecutionType.GENERATION if stage == "code2wav" else StageExecutionType.AR
    spec = StageSpec(stage, kind, folder, architecture=model_class.__name__, config_part=part)
    config = make_config(spec, {"skip_tokenizer_init": True, "max_model_len": 256, "gpu_memory_utilization": 0.02})
    own = {name: shape for name, shape in shapes.items() if name.startswith(f"{stage}.")}
    with one_rank(config), torch.device("meta"):
        model = model_class(vllm_config=config)
        loaded = model.load_weights((name, torch.empty(shape)) for name, shape in shapes.items())
        parameters = dict(model.named_parameters())
    assert set(parameters) <= loaded
    extra = parameters["tts_rows"].numel() if stage == "talker" else 0
    # Ours stack several of theirs; a shape that doesn't fit raises, so equal sizes mean that none is left over.
    assert sum(torch.Size(shape).numel() for shape in own.values()) == sum(p.numel() for p in parameters.values()) - extra
    assert len(own) > 200 and (stage != "thinker" or THINKER_TABLE in own)
    for name in (next(iter(own)), next(reversed(own))):
        with one_rank(config), torch.device("meta"), pytest.raises((AssertionError, ValueError, RuntimeError)):
            model.load_weights(iter([(name, torch.empty(*own[name][:-1], own[name][-1] + 1))]))


@pytest.fixture
def folder(checkpoint, tmp_path):
    return shutil.copytree(checkpoint(FAMILY), tmp_path / "checkpoint")


def first_shard(folder):
    return sorted(folder.glob("model-*.safetensors"))[0]


def rewrite(folder, change):
    """Change the tensors of the first shard, and what the index says of them."""
    path, index = first_shard(folder), folder / "model.safetensors.index.json"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    content = json.loads(index.read_text())
    others = {name: file for name, file in content["weight_map"].items() if file != path.name}
    index.write_text(json.dumps({**content, "weight_map": others | dict.fromkeys(tensors, path.name)}))


def edit(folder, file, *keys, value=None):
    """Set a field of a JSON file, or with None remove it."""
    content = found = json.loads((folder / file).read_text())
    for key in keys[:-1]:
        found = found[key]
    if value is None:
        del found[keys[-1]]
    else:
        found[keys[-1]] = value
    (folder / file).write_text(json.dumps(content))


def refused(folder, error=CheckpointError):
    """What is said of a folder, by the checks that come before any engine; always one line."""
    with pytest.raises(error) as caught:
        Blueprint.of(str(folder))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_whole_folder_is_taken(folder):
    blueprint = Blueprint.of(str(folder))
    assert blueprint.stages == ("thinker", "talker", "code2wav")
    assert blueprint.front_end.voices == ("aiden", "chelsie", "ethan") and blueprint.front_end.sample_rate == 24_000


def test_a_missing_shard(folder):
    first_shard(folder).unlink()
    assert "model-00001-of-00002.safetensors is missing" in refused(folder)


def test_a_shard_cut_short(folder):
    data = first_shard(folder).read_bytes()
    first_shard(folder).write_bytes(data[: len(data) // 2])
    assert "model-00001-of-00002.safetensors is no whole safetensors file" in refused(folder)


NAME = "code2wav.code_embedding.weight"


def test_a_missing_tensor(folder):
    rewrite(folder, lambda tensors: tensors.pop(NAME))
    assert refused(folder).endswith(f"no file has tensor {NAME}")


def test_an_extra_tensor(folder):
    rewrite(folder, lambda tensors: tensors.update({"talker.extra.weight": torch.zeros(2)}))
    said = refused(folder)
    assert "model-00001-of-00002.safetensors" in said and "talker.extra.weight belongs to no part" in said


def test_a_wrong_shape(folder):
    rewrite(folder, lambda tensors: tensors.update({NAME: tensors[NAME][:-1].clone()}))
    said = refused(folder)
    assert "model-00001-of-00002.safetensors" in said and f"{NAME} has shape [2047, 32], expected [2048, 32]" in said


def test_an_unknown_model_type(folder):
    edit(folder, "config.json", "model_type", value="qwen9_omni")
    assert "config.json has model_type 'qwen9_omni'" in refused(folder, UnknownModelError)


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        (("tts_bos_token_id",), None, "config.json lacks tts_bos_token_id"),
        (("tts_bos_token_id",), 704, "tts_bos_token_id is 704, no id below 704"),
        (("talker_config", "codec_bos_id"), -1, "talker_config.codec_bos_id is -1, no id below 1280"),
        (("talker_config", "speaker_id"), {}, "talker_config.speaker_id names no speaker"),
        (("talker_config", "speaker_id", "ethan"), 5000, "talker_config.speaker_id.ethan is 5000, no id below 1280"),
        (("talker_config", "accept_hidden_layer"), 4, "talker_config.accept_hidden_layer is 4, not one of 1..3"),
        (("talker_config", "num_code_groups"), 7, "talker_config.num_code_groups is 7, the vocoder needs 8"),
        (("code2wav_config", "codebook_size"), 128, "vocab_size is 1280, the vocoder needs 1152"),
        (("thinker_config", "audio_token_id"), None, "config.json lacks thinker_config.audio_token_id"),
    ],
)
def test_a_configuration_that_does_not_fit(folder, keys, value, said):
    edit(folder, "config.json", *keys, value=value)
    assert said in refused(folder)


def test_a_tokenizer_without_a_mark_of_speech(folder):
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<tts_text_bos>", "<tts_text_gone>"))
    assert "tokenizer.json lacks the token <tts_text_bos>" in refused(folder)


def test_a_tokenizer_of_other_ids(folder):
    edit(folder, "config.json", "tts_bos_token_id", value=670)
    assert "has <tts_text_bos> at 669, config.json has tts_bos_token_id 670" in refused(folder)


def test_no_chat_template(folder):
    (folder / "chat_template.json").unlink()
    edit(folder, "tokenizer_config.json", "chat_template")
    assert "chat template" in refused(folder)
