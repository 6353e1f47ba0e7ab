"""What a model declares, read from its class or an instance alike."""

import dataclasses

import pytest

from stagevox.contract import Capabilities, StageExecutionType


class Full:
    has_preprocess = True
    has_postprocess = True
    omni_pooler_payload_include_hidden = True
    mtp_request_info = True
    supports_multi_step_decode = True
    supports_multi_step_stages = ("talker", "thinker")
    supports_native_mrv2_data_plane = True
    supports_mrv2_full_graph_aux_outputs = True

    def preprocess_decode_batch(self): ...

    def preprocess_batch(self): ...

    def talker_mtp(self): ...

    def make_omni_output(self): ...


@pytest.mark.parametrize("model", [Full, Full()])
def test_everything_declared(model):
    found = dataclasses.asdict(Capabilities.of(model))
    assert found.pop("supports_multi_step_stages") == ("talker", "thinker")
    assert len(found) == 11
    assert all(value is True for value in found.values())


def test_nothing_declared():
    found = dataclasses.asdict(Capabilities.of(object()))
    assert found.pop("supports_multi_step_stages") == ()
    assert len(found) == 11
    assert all(value is False for value in found.values())


@pytest.mark.covers("PC-5")
def test_the_batch_hook_needs_has_preprocess():
    class Model:
        def preprocess_decode_batch(self): ...

    assert not Capabilities.of(Model).has_decode_batch


@pytest.mark.covers("PC-5")
def test_the_batch_hook_must_be_callable():
    class Model:
        has_preprocess = True
        preprocess_decode_batch = None
        talker_mtp = "no"

    found = Capabilities.of(Model)
    assert not found.has_decode_batch
    assert not found.has_talker_mtp


@pytest.mark.covers("RT-4")
def test_hidden_rows_cross_only_if_declared():
    class Model:
        omni_pooler_payload_include_hidden = False

    assert not Capabilities.of(Model).include_hidden


@pytest.mark.covers("EX-1")
def test_three_ways_to_run_a_stage():
    assert {kind.name: kind.value for kind in StageExecutionType} == {
        "AR": "ar",
        "GENERATION": "generation",
        "DIFFUSION": "diffusion",
    }
