"""A deploy file on the packaged model's engines: its settings have the effect they name, and change no sample beyond it (F35, F38)."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("vllm")

from stagevox.errors import CapabilityError, ConfigError
from stagevox.omni import Omni

pytestmark = [pytest.mark.covers("SV-2"), pytest.mark.filterwarnings("ignore")]

TEXT = "sixty two minus nineteen equals forty three"
FILE = """
stages:
  talker:
    engine_args: {max_num_seqs: "2", max_num_batched_tokens: 5.0, kv_cache_memory_bytes: 24 MiB}
    sampling: {max_tokens: 30, temperature: 0.9, top_k: 50, seed: 11}
    chunk_options: {sizes: [3, 7]}
platforms:
  cpu: {stages: {talker: {engine_args: {max_num_batched_tokens: 4}}}}
  cuda: {stages: {talker: {engine_args: {max_num_batched_tokens: 5}}}}
"""


def samples_of(omni, *args):
    """A result, and the samples of each of its pieces."""
    pieces = []

    def see(event):
        if getattr(event, "stage", None) == "code2wav" and len(event.output.multimodal):
            pieces.append(sum(len(value) for value in event.output.multimodal.values() if np.ndim(value) == 1))

    (result,) = omni.generate(TEXT, *args, on_event=see)
    assert result.error is None
    return result, pieces


def test_what_the_file_says_is_what_runs(tmp_path):
    path = tmp_path / "deploy.yaml"
    path.write_text(FILE)
    sampled = {"temperature": 0.9, "top_k": 50, "seed": 11}
    with Omni("mini") as omni:
        plain, plain_pieces = samples_of(omni)
        seeded, _ = samples_of(omni, {**sampled, "max_tokens": 30})
        greedy, _ = samples_of(omni, {"max_tokens": 30, "temperature": 0.0})
    assert len(plain.codes) > 30 and not np.array_equal(seeded.codes, greedy.codes)
    with Omni("mini", deploy_config=path) as omni:
        result, pieces = samples_of(omni)
        prompt = [row for row in omni.trace()["talker"] if row.is_prefill][:2]
        client, _ = samples_of(omni, {"temperature": 0.0})
        engine = omni._stages[1]._scheduler.vllm_config
    assert (engine.scheduler_config.max_num_seqs, engine.cache_config.kv_cache_memory_bytes) == (2, 24 << 20)
    assert [row.span for row in prompt] == [4, 2]  # the platform's budget, and so a cut prompt
    assert (len(result.codes), result.finish_reason) == (30, "length")  # the operator's cap, though the adapter sets its own
    # Chunks of 3, 7, 7, 7, 6 frames instead of 6, 12, 12: 640 samples a frame, the last one held back until the end.
    assert len(pieces) == 5 and len(plain_pieces) < len(plain.codes) / 7 and pieces[0] < plain_pieces[0]
    # The file's seed is what a client's is, in other chunks and spans; and the client's own parameters win.
    assert np.array_equal(result.codes, seeded.codes) and np.array_equal(result.audio, seeded.audio)
    assert np.array_equal(client.codes, greedy.codes) and np.array_equal(client.audio, greedy.audio)


@pytest.mark.parametrize(
    "setting, error, message",
    [
        ("code2wav: {engine_args: {max_num_seqs: 0}}", CapabilityError, "^code2wav: max_num_seqs .*greater than or equal to 1"),
        ("code2wav: {engine_args: {tensor_parallel_size: 2}}", CapabilityError, "^code2wav.tensor_parallel_size"),
        ("code2wav: {engine_args: {max_model_len: 1M}}", ConfigError, "^code2wav: "),
    ],
)
def test_values_that_only_vllm_can_refuse_are_refused_before_the_first_stage_starts(
    tmp_path, monkeypatch, setting, error, message
):
    monkeypatch.setattr("stagevox.omni.start_stage", lambda *_: pytest.fail("an engine was started"))
    path = tmp_path / "deploy.yaml"
    path.write_text(f"stages: {{{setting}}}")
    with pytest.raises(error, match=message):
        Omni("mini", deploy_config=path)
