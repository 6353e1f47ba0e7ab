"""Which models there are, and what becomes of names and folders that are none."""

from __future__ import annotations

import importlib
import json
import shutil

import pytest

from stagevox.contract import Capabilities, StageExecutionType
from stagevox.errors import CheckpointError, UnknownModelError
from stagevox.models.mini.config import MiniCode2WavConfig, MiniTalkerConfig
from stagevox.models.mini.pieces import WEIGHTS
from stagevox.models.mini.topology import FILES, FIXED
from stagevox.models.registry import ARCHITECTURES, register_models, resolve_topology


def load(path: str):
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


@pytest.fixture
def folder(tmp_path):
    """A whole checkpoint; weights stay empty but for the Thinker's, whose header is looked at."""
    for stage, names in FILES.items():
        (tmp_path / stage).mkdir()
        for name in names:
            source = WEIGHTS / stage / name
            if (name.endswith(".json") and source.exists()) or stage == "thinker":
                shutil.copyfile(source, tmp_path / stage / name)
            else:
                (tmp_path / stage / name).touch()
    return tmp_path


@pytest.mark.covers("EX-1")
def test_mini_has_three_stages_whose_classes_exist():
    topology = resolve_topology("mini")
    assert [stage.name for stage in topology.stages] == ["thinker", "talker", "code2wav"]
    assert [stage.execution_type for stage in topology.stages] == [
        StageExecutionType.AR,
        StageExecutionType.AR,
        StageExecutionType.GENERATION,
    ]
    assert topology.stages[0].input_adapter is None and topology.stages[-1].chunk_processor is None
    for stage in topology.stages:
        for path in (stage.chunk_processor, stage.input_adapter):
            assert path is None or load(path)() is not None
    assert load(topology.front_end)(topology.checkpoint).voices == ("slt",)


def test_a_folder_of_the_layout_is_a_model(folder):
    topology = resolve_topology(folder)
    assert topology.checkpoint == folder.resolve()
    assert [stage.checkpoint.name for stage in topology.stages] == list(FILES)
    assert resolve_topology(str(folder)).stages == topology.stages


@pytest.mark.parametrize("model", ["maxi", "", "/no/such/folder"])
def test_an_unknown_name_is_refused_with_the_known_ones(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownModelError) as caught:
        resolve_topology(model)
    assert caught.value.allowed == ("mini",)


def test_a_folder_of_no_known_layout_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnknownModelError, match=tmp_path.name):
        resolve_topology(tmp_path)


@pytest.mark.parametrize("missing", [f"{stage}/{name}" for stage, names in FILES.items() for name in names])
def test_a_missing_file_is_named(folder, missing):
    (folder / missing).unlink()
    with pytest.raises(CheckpointError, match=missing):
        resolve_topology(folder)


def test_a_folder_of_another_family_is_refused(folder):
    path = folder / "talker" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "qwen2"}))
    with pytest.raises(UnknownModelError, match="qwen2"):
        resolve_topology(folder)


def test_another_vocabulary_is_refused(folder):
    path = folder / "talker" / "tokenizer.json"
    path.write_text(path.read_text() + " ")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        resolve_topology(folder)


@pytest.mark.parametrize("stage", list(FILES))
def test_a_config_that_is_no_json_is_a_checkpoint_error(folder, stage):
    (folder / stage / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=f"{stage}/config.json"):
        resolve_topology(folder)


def edit(path, **fields):
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.mark.parametrize(("stage", "field"), [(stage, field) for stage, fields in FIXED.items() for field in fields])
@pytest.mark.parametrize("value", [None, 0, "x", []])
def test_a_config_that_the_bridge_does_not_fit_is_refused(folder, stage, field, value):
    edit(folder / stage / "config.json", **{field: value})
    with pytest.raises(CheckpointError, match=f"{stage}/config.json must have {field} "):
        resolve_topology(folder)


def test_tensors_that_the_thinker_lacks_are_named(folder):
    """vLLM starts without them and speaks from memory that nobody wrote."""
    path = folder / "thinker" / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"model.norm.weight", b"model.morn.weight", 1))
    with pytest.raises(CheckpointError, match=r"lacks the tensors model\.norm\.weight$"):
        resolve_topology(folder)


def test_tensors_of_more_layers_than_the_config_has_are_refused(folder):
    edit(folder / "thinker" / "config.json", num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"holds unknown tensors model\.layers\.2\."):
        resolve_topology(folder)


@pytest.mark.parametrize("data", [b"", b"\x05", b"\xff" * 100, b"\x02\0\0\0\0\0\0\0[]"])
def test_a_thinker_without_a_readable_header_is_refused(folder, data):
    (folder / "thinker" / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"thinker/model\.safetensors"):
        resolve_topology(folder)


@pytest.mark.parametrize("layers", [None, "3", 2.5])
def test_a_thinker_without_a_number_of_layers_is_refused(folder, layers):
    edit(folder / "thinker" / "config.json", num_hidden_layers=layers)
    with pytest.raises(CheckpointError, match="num_hidden_layers"):
        resolve_topology(folder)


def test_vllm_and_transformers_know_the_models():
    vllm = pytest.importorskip("vllm")
    from transformers import AutoConfig

    register_models()
    register_models()
    assert set(ARCHITECTURES) <= set(vllm.ModelRegistry.get_supported_archs())
    assert isinstance(AutoConfig.from_pretrained(WEIGHTS / "talker"), MiniTalkerConfig)
    assert isinstance(AutoConfig.from_pretrained(WEIGHTS / "code2wav"), MiniCode2WavConfig)


@pytest.mark.covers("RT-4", "PC-8")
def test_what_the_classes_declare():
    talker, code2wav = (Capabilities.of(load(path)) for name, path in ARCHITECTURES.items() if name.startswith("Mini"))
    assert talker.has_preprocess and talker.has_postprocess and talker.has_decode_batch and talker.has_talker_mtp
    assert not talker.include_hidden
    assert not code2wav.has_preprocess and not code2wav.has_talker_mtp
