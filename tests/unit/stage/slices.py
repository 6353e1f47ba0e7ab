"""A step's outputs, planned and made at once."""

from stagevox.stage.outputs import plan_outputs


def slice_outputs(rows, values, num_tokens, memory=None, *, hook="make_omni_output"):
    step = plan_outputs(rows, values, num_tokens, memory, hook=hook)
    return step.result() if step is not None else {}
