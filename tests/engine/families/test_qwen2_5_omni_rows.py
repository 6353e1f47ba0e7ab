"""The rows that the Thinker hands out, one by one, against those that the reference's Talker was given (RT-9)."""

import pytest
import torch

from stagevox.config.sampling import check_sampling
from stagevox.contract import MROPE_POSITIONS
from stagevox.models.qwen2_5_omni.bridge import TalkerInput
from stagevox.models.qwen2_5_omni.front_end import Qwen2_5OmniFrontEnd
from stagevox.models.qwen2_5_omni.talker import PROMPT_ROWS, REPLY_ROWS
from stagevox.models.qwen2_5_omni.topology import topology
from stagevox.stage.engine import StageEngine
from stagevox.stage.payload import StageRequest
from support.families import TINY
from support.modes import Mode
from support.qwen2_5_omni import AR, FAMILY, greedy, prompt, tensor
from support.talker_stage import count_cases

pytestmark = pytest.mark.filterwarnings("ignore")

TOLERANCE = 1e-4
"""Rows are about 2 in size; the same operations in another order come within 2e-5."""

NAMES = ("steady", "image", "audio")


@pytest.fixture(scope="module")
def oracle(golden):
    return golden(FAMILY)


def run(engine, checkpoint, oracle, names):
    """The Talker's input of each case, made from the Thinker's one chunk."""
    front_end, adapter = Qwen2_5OmniFrontEnd(checkpoint), TalkerInput(checkpoint)
    for name in names:
        case = oracle.cases[name]
        first = front_end.admit(name, prompt(case))
        fields = check_sampling(greedy(case), ("thinker", "talker"))["thinker"]
        engine.add(StageRequest(name, first.prompt_token_ids, sampling=fields, media=first.media, options=first.options))
    made = {}
    while engine.has_work():
        _, chunks = engine.step()
        for chunk in chunks:
            assert chunk.end and chunk.req_id not in made
            request = StageRequest(chunk.req_id, None, options={"voice": oracle.cases[chunk.req_id]["voice"]})
            made[chunk.req_id] = adapter.accept(request, chunk)
    assert set(made) == set(names)
    return made


def compare(oracle, made):
    for name, given in made.items():
        rows, reply = given.payload[PROMPT_ROWS], given.payload[REPLY_ROWS]
        torch.testing.assert_close(rows, tensor(oracle, f"{name}.prompt_rows"), rtol=0, atol=TOLERANCE, msg=name)
        wanted = tensor(oracle, f"{name}.reply_rows")
        # A reply that was cut has one row more here: the reference forgets its last token's.
        cut = oracle.cases[name]["text_ids"][-1] != 642
        assert len(reply) == len(wanted) + cut
        torch.testing.assert_close(reply[: len(wanted) - 2], wanted[:-2], rtol=0, atol=TOLERANCE, msg=name)
        torch.testing.assert_close(reply[-2:], wanted[-2:], rtol=0, atol=0, msg=name)
        positions, delta = given.payload[MROPE_POSITIONS]
        if f"{name}.positions" in oracle.waveforms:
            assert torch.equal(positions, tensor(oracle, f"{name}.positions").long()), name
            assert delta == oracle.cases[name]["position_delta"], name
        else:
            assert torch.equal(positions, torch.arange(len(rows)).expand(3, -1)) and delta == 0


@pytest.mark.covers("RT-9", "TK-1", "RT-1")
@pytest.mark.parametrize(
    "mode",
    [Mode(prefix=True), Mode(budget=32, blocks=9, prefix=True), Mode(budget=32, blocks=9, asynchronous=True)],
    ids=str,
)
def test_rows_of_every_position_once(mode, checkpoint, oracle):
    """Twice the same, so that with prefix caching the second round finds cached positions; media among them, and others beside."""
    folder = checkpoint(FAMILY)
    spec = topology(folder).stages[0]
    engine = StageEngine(spec, {**TINY, **AR, "max_model_len": 256, **mode.overrides}, record=True)
    try:
        for _ in range(2):
            made = run(engine, folder, oracle, (*NAMES, "other_voice", "short", "wordy"))
            compare(oracle, {name: made[name] for name in NAMES})
        trace = engine.trace()
        if mode.prefix:
            starts = [row.num_computed for row in trace if row.is_prefill and row.num_computed % 32 == 0 and row.num_computed]
            assert starts, "no position came from the cache"
        if mode.blocks:
            assert count_cases(trace)["replay"]
        assert engine.num_requests == 0 and not any(engine.state_size().values())
    finally:
        engine.close()
