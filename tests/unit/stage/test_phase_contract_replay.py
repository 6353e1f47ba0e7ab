"""Known positions come from the log: a replay makes nothing anew and hands nothing out twice (PC-14)."""

import pytest
import torch

from stagevox.contract import PHASE_FIELDS
from tests.unit.stage.toy import BATCH_HOOK, MTP, PROMPT_HOOK, BatchModel, BatchMTPModel, Steps, row

pytestmark = pytest.mark.covers("PC-12", "PC-14")

PROMPT = 4


def source(steps):
    return (BATCH_HOOK if isinstance(steps.model, BatchModel) else PROMPT_HOOK) + MTP


def prompt_rows(first, count):
    return [row(1, position, PROMPT_HOOK) for position in range(first, first + count)]


def logged_rows(steps, first, count):
    return [row(1, position, source(steps)) for position in range(first, first + count)]


def generated(steps, name="a", count=3):
    """A request of 4 prompt positions that has decoded ``count`` more, next to a neighbour that decodes all the while."""
    steps.add(name, 1, PROMPT)
    steps.decoding("n", 9, 2, 20)
    steps.step((name, PROMPT), ("n", 1))
    for _ in range(count):
        steps.step((name, 1), ("n", 1))
    frames = [[100 + p, 1, p - 1] for p in range(PROMPT, PROMPT + count)]
    assert steps.emitted[name] == frames
    return frames


def mtp_tags(steps):
    return [tags for tags, _ in steps.model.hook_calls("talker_mtp")]


def test_a_replay_across_the_boundary_reads_the_log(mtp_steps):
    """Positions 0..6 are known and 7 is the newest: one span over 0..6 crosses from prompt to logged positions."""
    frames = generated(mtp_steps)
    mtp_steps.preempt("a")
    made, hidden = len(mtp_tags(mtp_steps)), mtp_steps.state("a")["last_hidden"].clone()
    rows = mtp_steps.step(("a", 7), ("n", 1), resumed=["a"])
    assert mtp_steps.trace("a")[-1] == (0, 7, PROMPT, 8, False)
    assert rows["a"] == prompt_rows(0, 4) + logged_rows(mtp_steps, 4, 3)
    assert mtp_tags(mtp_steps)[made:] == [[9]]
    assert mtp_steps.emitted["a"] == frames
    assert mtp_steps.state("a")["last_hidden"].equal(hidden)

    rows = mtp_steps.step(("a", 1), ("n", 1))
    assert mtp_steps.trace("a")[-1] == (7, 1, PROMPT, 8, True)
    assert rows["a"] == logged_rows(mtp_steps, 7, 1)
    assert mtp_steps.emitted["a"] == [*frames, [107, 1, 6]]


@pytest.mark.parametrize("chunks", [(3, 3, 1), (2, 2, 2, 1), (1,) * 7, (5, 2), (4, 3)])
def test_a_chunked_replay(mtp_steps, chunks):
    """Chunks that end before, on and past the boundary, with one-token replay tails: only the newest position reaches MTP."""
    frames = generated(mtp_steps)
    mtp_steps.preempt("a")
    made, first, seen = len(mtp_tags(mtp_steps)), 0, []
    posts = len(mtp_steps.model.hook_calls("postprocess"))
    for span in chunks:
        rows = mtp_steps.step(("n", 1), ("a", span))
        seen += rows["a"]
        assert mtp_steps.trace("a")[-1] == (first, span, PROMPT, 8, False)
        first += span
    assert seen == prompt_rows(0, 4) + logged_rows(mtp_steps, 4, 3)
    assert mtp_tags(mtp_steps)[made:] == [[9]] * len(chunks)
    replayed = [infos for names, infos in mtp_steps.model.hook_calls("postprocess")[posts:] if names == ["a"]]
    assert replayed == []
    rows = mtp_steps.step(("n", 1), ("a", 1))
    assert rows["a"] == logged_rows(mtp_steps, 7, 1)
    assert mtp_steps.emitted["a"] == [*frames, [107, 1, 6]]


def test_a_one_token_replay_tail_goes_to_preprocess():
    """Past the prompt, one token, not prefill - and yet no decode row: its token is known."""
    steps = Steps(BatchMTPModel())
    generated(steps)
    steps.preempt("a")
    steps.step(("a", 5), ("n", 1))
    before = len(steps.model.calls)
    steps.step(("a", 1), ("n", 1))
    assert steps.trace("a")[-1] == (5, 1, PROMPT, 8, False)
    calls = [(hook, names) for hook, names, _ in steps.model.calls[before:]]
    assert ("preprocess", ["a"]) in calls
    assert [names for hook, names in calls if hook == "preprocess_decode_batch"] == [["n"]]
    (info,) = next(infos for hook, names, infos in steps.model.calls[before:] if hook == "preprocess")
    assert tuple(info[name] for name in PHASE_FIELDS) == (False, 5, PROMPT)
    assert [tags for hook, tags in calls if hook == "talker_mtp"] == [[9]]


def test_a_cached_replay_starts_past_the_prompt(mtp_steps):
    """With prefix caching a replay may begin at position 5 of prompt 4: no prefill, still known."""
    frames = generated(mtp_steps)
    mtp_steps.computed["a"] = 5
    rows = mtp_steps.step(("a", 2), ("n", 1))
    assert mtp_steps.trace("a")[-1] == (5, 2, PROMPT, 8, False)
    assert rows["a"] == logged_rows(mtp_steps, 5, 2)
    assert mtp_steps.emitted["a"] == frames


@pytest.mark.parametrize("span", [1, 3, 7])
def test_a_logged_position_reads_the_log_also_when_it_is_sampled(mtp_steps, span):
    """The token after position 6 was dropped: 6 is the newest position again, sampled this step, and its frame stands."""
    frames = generated(mtp_steps)
    mtp_steps.known["a"] = 7
    mtp_steps.computed["a"] = 7 - span
    made = len(mtp_tags(mtp_steps))
    rows = mtp_steps.step(("a", span), ("n", 1))
    assert mtp_steps.trace("a")[-1] == (7 - span, span, PROMPT, 7, False)
    assert rows["a"] == (prompt_rows(0, 4) + logged_rows(mtp_steps, 4, 3))[-span:]
    assert mtp_tags(mtp_steps)[made:] == [[9]]
    assert mtp_steps.emitted["a"] == frames
    assert mtp_steps.step(("a", 1), ("n", 1))["a"] == logged_rows(mtp_steps, 7, 1)
    assert mtp_steps.emitted["a"] == [*frames, [107, 1, 6]]


def test_two_replays_one_stopped_halfway(mtp_steps):
    """Preempted again in the middle of a replay: state and log are those of the first time."""
    frames = generated(mtp_steps, count=5)
    for spans in [(3, 3), (9,)]:
        mtp_steps.preempt("a")
        for span in spans:
            mtp_steps.step(("a", span), ("n", 1), resumed=["a"])
    assert [entry.num_computed for entry in mtp_steps.runner.step_log if entry.is_resumed] == [0, 3, 0]
    assert mtp_steps.state("a")["last_hidden"].tolist() == logged_rows(mtp_steps, 8, 1)
    assert mtp_steps.step(("a", 1), ("n", 1))["a"] == logged_rows(mtp_steps, 9, 1)
    assert mtp_steps.emitted["a"] == [*frames, [109, 1, 8]]


def test_a_replayed_frame_is_the_first_one_even_if_mtp_draws_at_random():
    """An MTP that never gives the same answer twice: what a replay conditions on is what was handed out."""

    class Model(BatchMTPModel):
        draws = 0

        def talker_mtp(self, input_ids, input_embeds, last_hidden, text_step):
            embeds, codes = super().talker_mtp(input_ids, input_embeds, last_hidden, text_step)
            self.draws += 1
            embeds[:, 3] = codes[:, 2] = self.draws
            return embeds, codes

    steps = Steps(Model())
    steps.add("a", 1, PROMPT)
    steps.decoding("n", 9, 2, 20)
    steps.step(("n", 1), ("a", PROMPT))
    for _ in range(3):
        steps.step(("n", 1), ("a", 1))
    assert [code[2] for code in steps.emitted["a"]] == [2, 3, 4]
    steps.preempt("a")
    rows = steps.step(("a", 7), ("n", 1))
    assert steps.model.draws == 5
    assert [embed[3] for embed in rows["a"][PROMPT:]] == [2.0, 3.0, 4.0]


def test_postprocess_is_given_each_position_once(mtp_steps):
    """A replay that runs into fresh positions hands only the fresh ones over, with the progress that goes with them."""
    mtp_steps.add("a", 1, PROMPT)
    mtp_steps.decoding("n", 9, 2, 20)
    mtp_steps.step(("a", 2), ("n", 1))
    mtp_steps.preempt("a")
    mtp_steps.step(("a", 4), ("n", 1))
    ((_, (info,)),) = [call for call in mtp_steps.model.hook_calls("postprocess") if call[0] == ["a"]][1:]
    assert tuple(info[name] for name in PHASE_FIELDS) == (True, 2, PROMPT)
    assert [entry[-1] for entry in mtp_steps.trace("n")] == [True, True]


def test_neighbours_of_a_replay_are_themselves(mtp_steps):
    generated(mtp_steps)
    mtp_steps.preempt("a")
    mtp_steps.step(("a", 7), ("n", 1))
    mtp_steps.step(("n", 1), ("a", 1))
    assert mtp_steps.emitted["n"] == [[900 + p, 9, p - 1] for p in range(20, 26)]


def test_logged_tensors_are_not_the_models_reused_storage():
    """A model may write its results into the same tensors each step."""

    class Model(BatchMTPModel):
        def talker_mtp(self, input_ids, input_embeds, last_hidden, text_step):
            embeds, codes = super().talker_mtp(input_ids, input_embeds, last_hidden, text_step)
            self.kept = getattr(self, "kept", None) or (torch.empty_like(embeds), torch.empty_like(codes))
            self.kept[0].copy_(embeds)
            self.kept[1].copy_(codes)
            return self.kept

    steps = Steps(Model())
    steps.add("a", 1, 1)
    steps.step(("a", 1))
    for _ in range(3):
        steps.step(("a", 1))
    steps.preempt("a")
    assert steps.step(("a", 4))["a"][1:] == logged_rows(steps, 1, 3)
    assert steps.runner.model_intermediate_buffer.logs["a"].codes().tolist() == [[101, 1, 0], [102, 1, 1], [103, 1, 2]]
