"""A voice as its training exports it, packaged: the shipped folders come out again."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from package_voice import package
from stagevox.models.mini.pieces import WEIGHTS


def bundle(folder) -> None:
    """The shipped weights in the layout of the training's export."""
    t, c = (json.loads((WEIGHTS / stage / "config.json").read_text()) for stage in ("talker", "code2wav"))
    voice = {
        "sample_rate": c["sample_rate"],
        "frame_rate": c["frame_rate"],
        "talker": {
            **t,
            "rope_theta": t["rope_parameters"]["rope_theta"],
            "codec_embedding_rows": [t["vocab_size"], *t["codebook_sizes"][1:]],
        },
        "code_predictor": {"num_layers": t["predictor_layers"], "intermediate_size": t["predictor_intermediate_size"]},
        "code2wav": {**c, "pre_ff": c["pre_intermediate_size"], "post_ff": c["post_intermediate_size"]},
    }
    (folder / "config.json").write_text(json.dumps(voice))
    (folder / "tokenizer.json").write_bytes((WEIGHTS / "talker" / "tokenizer.json").read_bytes())
    tensors = load_file(WEIGHTS / "talker" / "model.safetensors") | load_file(WEIGHTS / "code2wav" / "model.safetensors")
    for part in ("talker", "code_predictor", "code2wav"):
        own = {key.removeprefix(f"{part}."): value for key, value in tensors.items() if key.startswith(f"{part}.")}
        save_file(own, folder / f"{part}.safetensors")


@pytest.mark.parametrize("stage", ["talker", "code2wav"])
def test_packaging_the_export_gives_the_shipped_folders(tmp_path, stage):
    (tmp_path / "src").mkdir()
    bundle(tmp_path / "src")
    package(tmp_path / "src", tmp_path / "out", "slt")
    made, shipped = tmp_path / "out" / stage, WEIGHTS / stage
    assert json.loads((made / "config.json").read_text()) == json.loads((shipped / "config.json").read_text())
    tensors, want = load_file(made / "model.safetensors"), load_file(shipped / "model.safetensors")
    assert tensors.keys() == want.keys()
    assert all(tensor.dtype == torch.float16 and torch.equal(tensor, want[key]) for key, tensor in tensors.items())
    assert (made / "tokenizer.json").exists() == (stage == "talker")
