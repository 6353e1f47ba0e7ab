"""docs/configuration.md: its examples load, and it has every key of the schema and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stagevox.config.blueprint import Blueprint
from stagevox.config.deploy import DEFAULTS, Connectors, Deadlines, Deploy, Extras, Platforms, Stage
from stagevox.config.layer import command_line_layer, file_layers
from stagevox.config.stage_settings import check_engine_settings, checked, model_keys
from stagevox.config.topology import StageSpec, Topology
from stagevox.config.yaml_text import parse_document
from stagevox.contract import StageExecutionType

pytestmark = [pytest.mark.covers("SV-2"), pytest.mark.filterwarnings("ignore")]

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "configuration.md").read_text()
EXAMPLES = dict(re.findall(r"^```yaml\n# (\w+)(.*?)^```$", PAGE, re.M | re.S))
BLOCKS = {"stages.NAME": Stage, "stages.NAME.engine_extras": Extras, "connectors": Connectors, "deadlines": Deadlines}


def schema_keys():
    keys = {*Deploy.model_fields, *(f"platforms.{name}" for name in Platforms.model_fields)}
    for path, block in BLOCKS.items():
        keys |= {f"{path}.{name}" for name in block.model_fields}
    return keys - {"connectors", "deadlines"}  # blocks whose keys stand there


def rows():
    return dict(re.findall(r"^\| `([\w.]+)` \| ?([^|]*?) ?\|", PAGE, re.M))


def test_every_key_is_on_the_page_and_every_key_on_the_page_is_one():
    assert set(rows()) == schema_keys()


def test_defaults_on_the_page_are_those_in_the_code():
    found = rows()
    for key, value in DEFAULTS.items():
        shown = found[f"stages.NAME.{key}" if key == "replicas" else key].strip("`")
        assert shown == (f"{value:g}" if isinstance(value, float) else str(value)), key


def test_there_is_an_example_a_family():
    assert set(EXAMPLES) == {"mini", "qwen2_5_omni", "qwen3_omni", "qwen3_tts"}


def test_the_packaged_voices_example_loads(tmp_path):
    path = tmp_path / "deploy.yaml"
    path.write_text("#" + EXAMPLES["mini"])
    blueprint = Blueprint.of("mini", deploy_config=path)
    explained = blueprint.explained()
    assert explained.value("stages", "talker", "engine_args", "kv_cache_memory_bytes") == 24 << 20
    assert blueprint.topology.stages[1].chunk_options == {"sizes": [2, 6, 24, 64]}
    assert explained.deadline == 10


FRAMES = {"qwen2_5_omni": "stagevox.models.qwen2_5_omni.bridge:TalkerCodes"}
"""Chunk processors of talkers; the families with several codes a frame share one."""


def stage(family, name):
    """A stage of a family without its checkpoint: what takes options is the family's own."""
    return StageSpec(
        name,
        StageExecutionType.AR,
        Path("/nowhere"),
        chunk_processor=FRAMES.get(family, "stagevox.models.qwen3_talker.frames:TalkerFrames") if name == "talker" else None,
        input_adapter=f"stagevox.models.{family}.bridge:Code2WavInput" if name == "code2wav" else None,
    )


@pytest.mark.parametrize("family", sorted(set(EXAMPLES) - {"mini"}))
def test_the_families_examples_load(family):
    names = re.match(r": ([\w, ]+)\n", EXAMPLES[family])[1].split(", ")
    stages = tuple(stage(family, name) for name in names)
    topology = Topology(family, stages, "none:none", Path("/nowhere"))
    keys = model_keys(topology)
    layers = file_layers(parse_document("#" + EXAMPLES[family], "deploy.yaml", "deploy_config"), keys)
    layers = check_engine_settings({name: checked(layer, topology, keys) for name, layer in layers.items()}, keys)
    assert any(layer.settings for layer in layers.values())


def test_the_command_lines_on_the_page_are_taken():
    settings = re.findall(r"--stage '?(talker\.[^'`\n]+)", PAGE)
    assert len(settings) >= 4
    keys = model_keys(Blueprint.of("mini").model)
    for setting in settings:
        assert command_line_layer([setting], keys).settings
