# ruff: noqa: E501 - a line a case
"""Deploy files and --stage: what is taken, and that what is not says where and what would do (F35)."""

from __future__ import annotations

import re
import time

import pytest

from stagevox import Omni
from stagevox.config.blueprint import Blueprint
from stagevox.config.deploy import STAGE_KEYS, Deploy, flatten
from stagevox.errors import CapabilityError, ConfigError, UnknownOverrideError, UnknownStageError

pytestmark = [
    pytest.mark.covers("SV-2"),
    pytest.mark.filterwarnings("ignore"),  # what torch and vLLM warn of while they are imported
]


def test_all_that_there_is(model, deploy):
    path = deploy("""
stages:
  thinker:
  talker:
    devices: [0]
    engine_args: {max_num_seqs: "4", kv_cache_memory_bytes: 24 MiB, gpu_memory_utilization: 1e-1}
    sampling: {temperature: "0.7", top_k: null, seed: 1.0}
    chunk_options: {sizes: [2, 8.0], context: "1"}
    model_runner: v1
    engine_extras: {}
    replicas: 1
  code2wav: {input_options: {left_context: 3, smooth: on}}
connectors: {kind: tcp, window: 4, addresses: {talker: "tcp://10.0.0.2:5555", code2wav: "tcp://[::1]:*"}}
deadlines: {input: 10}
model_runner: v1
platforms: {cpu: {deadlines: {input: 60}}, cuda:, rocm: {}}
""")
    blueprint = Blueprint.of("fake", deploy_config=path, platform="cuda")
    thinker, talker, code2wav = blueprint.topology.stages
    assert talker.sampling == {"temperature": 0.7, "seed": 1}
    assert talker.chunk_options == {"sizes": [2, 8], "context": 1}
    assert code2wav.input_options == {"left_context": 3, "smooth": True}
    assert thinker == model.topology.stages[0]
    assert set(blueprint.overrides) == {"talker"} and blueprint.overrides["talker"]["device_ids"] == [0]
    effective = blueprint.effective
    assert effective.value("connectors", "window") == 4 and effective.value("connectors", "addresses", "talker")
    assert effective.deadline == 10.0
    assert blueprint.explained().block("talker", "engine_args") == {
        "max_num_seqs": 4,
        "dtype": "float32",
        "kv_cache_memory_bytes": 24 << 20,
        "gpu_memory_utilization": 0.1,
    }
    assert model.topology.stages[1].sampling == {"temperature": 0.0, "top_k": 20}


@pytest.mark.parametrize(
    "text, error, message",
    [
        # keys that aren't there: the path, the line, the nearest one
        ("stagse: {}", UnknownOverrideError, r"^stagse: F:1: no such key \(allowed: stages,"),
        ("stages:\n  takler: {}", UnknownStageError, r"^stages\.takler: F:2: no such stage \(allowed: talker, thinker, code2wav\)"),
        ("stages:\n  talker:\n    replcas: 1", UnknownOverrideError, r"^stages\.talker\.replcas: F:3: no such key \(allowed: replicas,"),
        ("stages: {talker: {engine_args:\n {max-num-seq: 4}}}", UnknownOverrideError, r"^stages\.talker\.engine_args\.max-num-seq: F:2: .*\(allowed: max_num_seqs,"),
        ("stages: {talker: {sampling: {temprature: 1}}}", UnknownOverrideError, r"^stages\.talker\.sampling\.temprature: F:1: .*\(allowed: temperature,"),
        ("stages: {talker: {chunk_options: {size: [1]}}}", UnknownOverrideError, r"^stages\.talker\.chunk_options\.size: F:1: no such option \(allowed: sizes, context\)"),
        ("stages: {talker: {chunk_options: {concat: x}}}", UnknownOverrideError, r"no such option \(allowed: context, sizes\)"),
        ("stages: {code2wav: {input_options: {left_contxt: 1}}}", UnknownOverrideError, r"no such option \(allowed: left_context, smooth\)"),
        ("stages: {talker: {engine_extras: {multi: 4}}}", UnknownOverrideError, r"^stages\.talker\.engine_extras\.multi: F:1: no such key"),
        ("connectors: {knd: shm}", UnknownOverrideError, r"^connectors\.knd: F:1: no such key \(allowed: kind,"),
        ("connectors: {addresses: {tlaker: 'tcp://a:1'}, kind: tcp}", UnknownStageError, r"^connectors\.addresses\.tlaker: F:1: .*\(allowed: talker,"),
        ("deadlines: {inptu: 1}", UnknownOverrideError, r"^deadlines\.inptu: F:1: no such key \(allowed: input\)"),
        ("platforms: {cdua: {}}", UnknownOverrideError, r"^platforms\.cdua: F:1: no such key \(allowed: cuda,"),
        # of a platform that doesn't run here
        ("platforms: {tpu: {stages: {takler: {}}}}", UnknownStageError, r"^platforms\.tpu\.stages\.takler: F:1: no such stage"),
        ("platforms: {tpu: {stages: {talker: {engine_args: {dtyp: x}}}}}", UnknownOverrideError, r"^platforms\.tpu\.stages\.talker\.engine_args\.dtyp: F:1: .*\(allowed: dtype,"),
        ("platforms: {tpu: {stages: {talker: {sampling: {top_p: 7}}}}}", ConfigError, r"^platforms\.tpu\.stages\.talker\.sampling\.top_p: F:1: out of range: 7"),
        # in the wrong block
        ("talker: {}", UnknownOverrideError, r"^talker: F:1: not here: talker belongs in stages$"),
        ("max_num_seqs: 4", UnknownOverrideError, r"^max_num_seqs: F:1: not here: max_num_seqs belongs in stages\.NAME\.engine_args$"),
        ("stages: {talker: {max_num_seqs: 4}}", UnknownOverrideError, r"not here: max_num_seqs belongs in stages\.talker\.engine_args$"),
        ("stages: {talker: {max_num_seqz: 4}}", UnknownOverrideError, r"no such key; max_num_seqs belongs in stages\.talker\.engine_args \(allowed: max_num_seqs\)$"),
        ("stages: {talker: {temperature: 1}}", UnknownOverrideError, r"not here: temperature belongs in stages\.talker\.sampling$"),
        ("stages: {talker: {engine_args: {temperature: 1}}}", UnknownOverrideError, r"belongs in stages\.talker\.sampling$"),
        ("stages: {talker: {engine_args: {replica: 1}}}", UnknownOverrideError, r"replicas belongs in stages\.talker "),
        ("stages: {talker: {sizes: [1]}}", UnknownOverrideError, r"not here: sizes belongs in stages\.talker\.chunk_options$"),
        ("stages: {talker: {connectors: {}}}", UnknownOverrideError, r"not here: connectors belongs in the top of the file$"),
        ("stages: {connectors: {}}", UnknownStageError, r"^stages\.connectors: F:1: no such stage"),
        ("kind: shm", UnknownOverrideError, r"not here: kind belongs in connectors$"),
        ("cpu: {}", UnknownOverrideError, r"not here: cpu belongs in platforms$"),
        ("platforms: {cpu: {platforms: {}}}", UnknownOverrideError, r"^platforms\.cpu\.platforms: .*belongs in the top of the file$"),
        ("platforms: {cpu: {talker: {}}}", UnknownOverrideError, r"talker belongs in platforms\.cpu\.stages$"),
        ("stages: {talker: {engine_args: {device_ids: [0]}}}", UnknownOverrideError, r"it is called devices, in stages\.talker$"),
        ("stages: {talker: {engine_args: {worker_cls: x}}}", UnknownOverrideError, r"engine_args\.worker_cls: F:1: not an engine argument"),
        # values
        ("stages: [talker]", ConfigError, r"^stages: F:1: not a mapping but a list$"),
        ("stages: {talker: 3}", ConfigError, r"^stages\.talker: F:1: not a mapping but a int$"),
        ("stages: {talker: {engine_args: [1]}}", ConfigError, r"^stages\.talker\.engine_args: F:1: not a mapping but a list$"),
        ("stages: {talker: {engine_args: {max_num_seqs: four}}}", ConfigError, r"^stages\.talker\.engine_args\.max_num_seqs: F:1: 'four': input should be a valid integer"),
        ("stages: {talker: {engine_args: {max_num_seqs: 010}}}", ConfigError, r"'010': input should be a valid integer"),
        ("stages: {talker: {engine_args: {enforce_eager: 1}}}", ConfigError, r"enforce_eager: F:1: 1: input should be a valid boolean"),
        ("stages: {talker: {engine_args: {revision: 12}}}", ConfigError, r"revision: F:1: 12: .*put it in quotes"),
        ("stages: {talker: {engine_args: {gpu_memory_utilization: .nan}}}", ConfigError, r"not a finite number: nan"),
        ("stages: {talker: {sampling: {temperature: hot}}}", ConfigError, r"^stages\.talker\.sampling\.temperature: F:1: not a number: 'hot'"),
        ("stages: {talker: {sampling: {max_tokens: 5, min_tokens: 6}}}", ConfigError, r"sampling\.min_tokens: F:1: more than max_tokens: 6 > 5"),
        ("stages: {talker: {chunk_options: {sizes: 4}}}", ConfigError, r"^stages\.talker\.chunk_options\.sizes: F:1: 4: input should be a valid "),
        ("stages: {talker: {chunk_options: {sizes: [4, 0]}}}", ConfigError, r"^stages\.talker\.chunk_options\.sizes: F:1: can't be: sizes must be positive$"),
        ("stages: {talker: {replicas: 2}}", CapabilityError, r"^stages\.talker\.replicas: F:1: reserved: .*\(allowed: 1\)"),
        ("stages: {talker: {replicas: 0}}", CapabilityError, r"reserved"),
        ("stages: {talker: {model_runner: v2}}", CapabilityError, r"^stages\.talker\.model_runner: F:1: not there yet \(allowed: v1\)"),
        ("model_runner: v2", CapabilityError, r"not there yet \(allowed: v1\)"),
        ("stages: {talker: {model_runner: v3}}", ConfigError, r"no such choice: 'v3' \(allowed: v1, v2\)"),
        ("stages: {talker: {devices: [0, 1]}}", CapabilityError, r"^stages\.talker\.devices: F:1: a stage runs on one device"),
        ("stages: {talker: {devices: []}}", ConfigError, r"^stages\.talker\.devices: F:1: "),
        ("stages: {talker: {devices: -1}}", ConfigError, r"^stages\.talker\.devices: F:1: "),
        ("stages: {talker: {devices: 0}}", CapabilityError, r"^stages\.talker\.devices: F:1: a CPU has no devices"),
        ("connectors: {kind: rdma}", ConfigError, r"^connectors\.kind: F:1: no such choice: 'rdma' \(allowed: "),
        ("connectors: {window: 0}", ConfigError, r"^connectors\.window: F:1: 0: input should be greater than or equal to 1"),
        ("connectors: {window: 65}", ConfigError, r"^connectors\.window: F:1: 65: input should be less than or equal to 64"),
        ("connectors: {kind: local, window: 4}", ConfigError, r"^connectors\.window: F:1: the local road has none"),
        ("connectors: {kind: shm, addresses: {talker: 'tcp://a:1'}}", ConfigError, r"^connectors\.addresses\.talker: F:1: only with connectors\.kind tcp"),
        ("connectors: {kind: tcp, addresses: {talker: 'tcp://a:1', code2wav: 'tcp://a:1'}}", ConfigError, r"the same as that of talker"),
        ("connectors: {kind: tcp, addresses: {talker: 'a:1'}}", ConfigError, r"^connectors\.addresses\.talker: F:1: 'a:1': not an address"),
        ("connectors: {kind: tcp, addresses: {talker: 'tcp://a:70000'}}", ConfigError, r"not an address"),
        ("connectors: {kind: tcp, addresses: {talker: 7}}", ConfigError, r"^connectors\.addresses\.talker: F:1: not a text: 7"),
        ("deadlines: {input: 0}", ConfigError, r"^deadlines\.input: F:1: 0: input should be greater than 0"),
        ("deadlines: {input: .inf}", ConfigError, r"^deadlines\.input: F:1: not a finite number"),
        # files
        ("", ConfigError, r"^deploy_config: F is empty"),
        ("# stages:\n", ConfigError, r"^deploy_config: F is empty"),
        ("- a", ConfigError, r"^deploy_config: F holds not a mapping but a list"),
        ("text", ConfigError, r"^deploy_config: F holds not a mapping but a str"),
        ("stages: {talker: {replicas: 1, replicas: 1}}", ConfigError, r"^deploy_config: F, line 1: 'replicas' stands there twice"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_and_starts_no_engine(model, deploy, text, error, message):
    path = deploy(text)
    with pytest.raises(ConfigError) as caught:
        Omni("fake", deploy_config=path)
    assert type(caught.value) is error
    assert re.search(message, str(caught.value).replace(str(path), "F")), str(caught.value)
    assert model.started == []


@pytest.mark.parametrize(
    "settings, error, message",
    [
        (["talker"], ConfigError, r"^--stage: not of the form NAME\.key=value: 'talker'"),
        (["talker=4"], ConfigError, "not of the form"),
        (["=4"], ConfigError, "not of the form"),
        (["talker..x=4"], ConfigError, "not of the form"),
        (["talker.max_num_seqs="], ConfigError, r"^stages\.talker\.engine_args\.max_num_seqs: --stage: no value"),
        (["talker.max_num_seqs=[1"], ConfigError, r"^--stage talker\.max_num_seqs: expected"),
        (["talker.max_num_seqs=4", "talker.engine_args.max_num_seqs=5"], ConfigError, "given twice: 4 and 5"),
        (["talker.sampling=3", "talker.sampling.seed=1"], ConfigError, "given twice"),
        (["talker.sampling.seed=1", "talker.sampling={seed: 2}"], ConfigError, "given twice: 1 and 2"),
        (["takler.max_num_seqs=4"], UnknownStageError, r"^stages\.takler: --stage: no such stage \(allowed: talker,"),
        (["talker.max_num_seqz=4"], UnknownOverrideError, r"\(allowed: max_num_seqs,"),
        (["talker.replica=4"], UnknownOverrideError, r"replicas belongs in stages\.talker"),
        (["talker.temperature=1"], UnknownOverrideError, r"^stages\.talker\.temperature: --stage: not here: .*sampling"),
        (["talker.seed=1"], UnknownOverrideError, r"belongs in stages\.talker\.sampling or stages\.talker\.engine_args$"),
        (["talker.hf_overrides.a=1"], ConfigError, r"no key inside of a value; give all of it: talker\.hf_overrides=\{\.\.\.\}"),
        (["talker.replicas=2"], CapabilityError, "reserved"),
        (["talker.replicas={}"], ConfigError, r"^stages\.talker\.replicas: --stage: \{\}"),
        (["talker.sampling=3"], ConfigError, r"^stages\.talker\.sampling: --stage: not a mapping but a int"),
        (["talker.max_num_seqs=on"], ConfigError, "True: input should be a valid integer"),
    ],
)
def test_settings_of_the_command_line_that_are_wrong(model, settings, error, message):
    with pytest.raises(ConfigError, match=message) as caught:
        Blueprint.of("fake", stage_settings=settings).check_overrides()
    assert type(caught.value) is error


def test_settings_of_the_command_line(model):
    blueprint = Blueprint.of(
        "fake",
        stage_settings=[
            "talker.max_num_seqs=4",
            "talker.engine_args.hf_overrides={a: {b: 1e-3}}",
            "talker.sampling={temperature: 0.5, seed: 7}",
            "talker.chunk_options.sizes=[1, 2]",
            "thinker.enforce_eager=yes",
        ],
    )
    assert blueprint.explained().operators("talker", "engine_args") == {"max_num_seqs": 4, "hf_overrides": {"a": {"b": 0.001}}}
    assert blueprint.overrides["thinker"] == {"enforce_eager": True}
    assert blueprint.topology.stages[1].sampling == {"temperature": 0.5, "top_k": 20, "seed": 7}
    assert blueprint.topology.stages[1].chunk_options == {"sizes": [1, 2], "context": 3}


def test_no_key_of_a_stage_is_an_engine_argument():
    """Or ``--stage talker.KEY`` could mean either."""
    from stagevox.stage.engine_args import engine_arg_names

    assert not set(STAGE_KEYS) & engine_arg_names()


def test_only_what_was_written_counts():
    assert flatten(
        Deploy.model_validate({"stages": {"a": None, "b": {"engine_args": {"x": None, "y": {}}}}, "deadlines": None})
    ) == {
        ("stages", "b", "engine_args", "x"): None,
        ("stages", "b", "engine_args", "y"): {},
    }


@pytest.mark.parametrize("road", ["{kind: shm}", "{kind: tcp}", "{window: 4}"])
def test_a_road_between_processes_is_refused_in_one(model, deploy, road):
    path = deploy(f"connectors: {road}")
    with pytest.raises(CapabilityError, match=r"^connectors\..*: has no use where all stages share one process"):
        Omni("fake", deploy_config=path)
    assert model.started == []
    deploy("connectors: {kind: local}")
    Omni("fake", deploy_config=path).close()


@pytest.mark.parametrize(
    "text",
    ["L: 1", "stages: {L: {}}", "stages: {talker: {L: 1}}", "stages: {talker: {engine_args: {L: 1}}}",
     "stages: {talker: {engine_args: {max_num_seqs: L}}}", "stages: {talker: {sampling: {L: 1}}}", "connectors: {kind: L}",
     "stages: {talker: {sampling: {seed: L}}}", "stages: {talker: {engine_args: {kv_cache_memory_bytes: 9L}}}",
     "connectors: {kind: tcp, addresses: {talker: L}}", "stages: {talker: {replicas: L}}", "deadlines: {input: L}", "? L\n: {a: 1, a: 2}"],
)  # fmt: skip
@pytest.mark.parametrize("long", ["x" * 150_000, "9" * 4000, "x\u00e9 " * 30_000])
def test_long_words_are_answered_shortly_and_soon(model, deploy, text, long):
    path = deploy(text.replace("L", f'"{long}"') if "9L" not in text else text.replace("L", long.replace(" ", "") + "MiB"))
    started = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        Blueprint.of("fake", deploy_config=path).check_overrides()
    assert time.monotonic() - started < 20 and len(str(caught.value)) < 2000


def test_a_path_that_is_none(model):
    with pytest.raises(ConfigError, match="^deploy_config: not a path but a int"):
        Blueprint.of("fake", deploy_config=3)
