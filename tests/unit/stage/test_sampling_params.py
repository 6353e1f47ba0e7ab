"""Sampling parameters are layered, not replaced."""

import pytest
from vllm.exceptions import VLLMValidationError

from stagevox.stage.sampling import sampling_params


def test_constraints_lie_over_what_the_client_sent():
    assert sampling_params({"min_tokens": 9}, {"min_tokens": 2}, 100).min_tokens == 9
    params = sampling_params({"temperature": 0.5, "min_tokens": 0}, {"min_tokens": 2}, 100)
    assert (params.temperature, params.min_tokens) == (0.5, 2)


def test_stop_ids_are_joined_each_once():
    params = sampling_params({"stop_token_ids": [7, 8]}, {"stop_token_ids": [8, 9]}, 100)
    assert params.stop_token_ids == [7, 8, 9]


@pytest.mark.parametrize("fields", [{}, {"stop_token_ids": None}, {"stop_token_ids": []}])
def test_stop_ids_of_the_model_stand_without_the_clients(fields):
    assert sampling_params(fields, {"stop_token_ids": [9]}, 100).stop_token_ids == [9]


def test_inputs_are_not_changed():
    fields, constraints = {"stop_token_ids": [7]}, {"stop_token_ids": [9]}
    sampling_params(fields, constraints, 100)
    assert (fields, constraints) == ({"stop_token_ids": [7]}, {"stop_token_ids": [9]})


@pytest.mark.parametrize(("asked", "room", "given"), [(5, 100, 5), (500, 100, 100), (None, 100, 100)])
def test_max_tokens_never_exceeds_the_context(asked, room, given):
    fields = {} if asked is None else {"max_tokens": asked}
    assert sampling_params(fields, {}, room).max_tokens == given


def test_token_ids_are_not_turned_into_text_unless_asked_for():
    assert sampling_params({}, {}, 10).detokenize is False
    assert sampling_params({"detokenize": True}, {}, 10).detokenize is True


@pytest.mark.parametrize(("asked", "given"), [(90, 30), (30, 30), (10, 10)])
def test_a_cap_of_the_model_holds_and_never_raises_what_was_asked(asked, given):
    assert sampling_params({"max_tokens": asked}, {"max_tokens": 30}, 100).max_tokens == given


@pytest.mark.parametrize(("asked", "given"), [(90, 30), (30, 30), (10, 10), (None, 0)])
def test_a_minimum_gives_way_to_the_cap(asked, given):
    assert sampling_params({"min_tokens": asked}, {"max_tokens": 30}, 100).min_tokens == given


def test_zero_tokens_are_not_taken_for_no_limit():
    with pytest.raises(VLLMValidationError, match="max_tokens must be at least 1, got 0"):
        sampling_params({"max_tokens": 0}, {}, 100)


def test_an_unknown_parameter_is_refused():
    with pytest.raises(TypeError, match="temprature"):
        sampling_params({"temprature": 1.0}, {}, 10)
