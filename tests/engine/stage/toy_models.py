"""Tiny models under the phase contract on stock Qwen2 layers, their adapter, and a tiny generation model.

What conditions position ``p`` of a request is row ``p % len(rows)`` of its ``rows [K, H]``, added to the token's embedding. With MTP the
frame of a generated position is ``[id, argmax(last_hidden[:16])]`` and its second code adds a row of ``BOOK``.
A request whose state has ``fault = {"hook", "kind", "at"}`` makes that hook misbehave from position ``at`` on.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from vllm import ModelRegistry
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

from stagevox.contract import MTP_INPUTS, NUM_COMPUTED_TOKENS, SAMPLE_RATE, WAVEFORM, OmniOutput, OwnedBatchTensor
from stagevox.errors import MissingStateError
from stagevox.stage.payload import StageInput

HIDDEN = 64
BOOK = torch.randn(16, HIDDEN, generator=torch.Generator().manual_seed(3)) * 0.1


class Boom(Exception):
    """What a faulty hook raises."""


def faulty(info, hook, last=None):
    """The kind of fault that this hook has for this request now, if any."""
    fault = info.get("fault")
    position = info[NUM_COMPUTED_TOKENS] if last is None else last
    return fault["kind"] if fault and fault["hook"] == hook and position >= fault["at"] else None


def spoil(result, kind):
    """``(ids, embeds, ..., update)`` with one thing wrong."""
    if kind == "raise":
        raise Boom("marked request")
    if kind == "rows":
        return (result[0], result[1][:-1], *result[2:])
    if kind == "shape":
        return (result[0], result[1][:, :-1], *result[2:])
    assert kind == "updates"
    return (*result[:-1], [*result[-1], {}]) if isinstance(result[-1], list) else (*result[:-1], 7)


class ToyConditioned(Qwen2ForCausalLM):
    """Absolute-position conditioning, batched decode hook, postprocess; no MTP."""

    has_preprocess = True
    has_postprocess = True
    supports_multi_step_decode = True

    def preprocess(self, input_ids, input_embeds, **info):
        if "rows" not in info:
            raise MissingStateError("preprocess", "rows was never stored")
        rows, first = info["rows"], info[NUM_COMPUTED_TOKENS]
        embeds = input_embeds + rows[torch.arange(first, first + len(input_ids)) % len(rows)]
        result = input_ids, embeds, {}
        kind = faulty(info, "preprocess", first + len(input_ids) - 1)
        return spoil(result, kind) if kind else result

    def preprocess_decode_batch(self, *, input_ids, req_infos):
        text = torch.stack([info["rows"][info[NUM_COMPUTED_TOKENS] % len(info["rows"])] for info in req_infos])
        result = input_ids, self.embed_input_ids(input_ids) + text, [{} for _ in req_infos]
        for info in req_infos:
            kind = faulty(info, "preprocess_decode_batch")
            if kind:
                return spoil(result, kind)
        return result

    def postprocess(self, hidden, **info):
        first = info[NUM_COMPUTED_TOKENS]
        kind = faulty(info, "postprocess", first + len(hidden) - 1)
        if kind:
            return spoil((0,), kind) if kind == "raise" else 7
        seen = [*info.get("seen", ()), *range(first, first + len(hidden))]
        return {"last_hidden": hidden[-1:].clone(), "seen": seen}


class ToyScalar(ToyConditioned):
    """The same without the batched hook."""

    preprocess_decode_batch = None


class ToyMTP(ToyConditioned):
    """The same with runner-managed MTP. A marked request poisons its ``text_step``, since that is all MTP sees of it."""

    def preprocess(self, input_ids, input_embeds, **info):
        result = super().preprocess(input_ids, input_embeds, **info)
        if "last_hidden" not in info or not isinstance(result[2], dict):
            return result
        return *result[:2], {**result[2], MTP_INPUTS: (info["last_hidden"], self.text_steps([info]))}

    def preprocess_decode_batch(self, *, input_ids, req_infos):
        ids, embeds, updates = super().preprocess_decode_batch(input_ids=input_ids, req_infos=req_infos)
        hidden = torch.cat([info["last_hidden"] for info in req_infos])
        return ids, embeds, hidden, self.text_steps(req_infos), updates

    def text_steps(self, infos):
        steps = torch.stack([info["rows"][info[NUM_COMPUTED_TOKENS] % len(info["rows"])] for info in infos])
        for step, info in zip(steps, infos, strict=True):
            kind = faulty(info, "talker_mtp")
            if kind:
                step[0] = float({"raise": "nan", "rows": "inf", "shape": "-inf"}[kind])
        return steps

    def talker_mtp(self, input_ids, input_embeds, last_hidden, text_step):
        codes = torch.stack([input_ids.long(), last_hidden[:, :16].argmax(-1)], dim=1)
        result = self.embed_input_ids(input_ids) + text_step + BOOK[codes[:, 1]], codes
        flags = text_step[:, 0]
        if flags.isnan().any():
            raise Boom("marked request")
        if flags.isinf().any():
            return (result[0][:-1], codes) if (flags > 1e9).any() else (result[0][:, :-1], codes)
        return result


class ToyExporting(Qwen2ForCausalLM):
    """No preprocessing; hands out its hidden rows, token-aligned positions, and one value a request."""

    omni_pooler_payload_include_hidden = True
    supports_multi_step_stages = ("toy",)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None, **kwargs):
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds), positions

    def make_omni_output(self, model_outputs, *, model_intermediate_buffer, request_token_spans, **kwargs):
        hidden, positions = model_outputs
        for state in model_intermediate_buffer:
            kind = state.get("fault")
            if kind == "raise":
                raise Boom("marked request")
            if kind == "type":
                return None
            if kind == "rows":
                return OmniOutput(hidden, {"position": positions[:-1]})
            if kind == "hidden":
                return OmniOutput(hidden[:0], {"position": positions})
        first = [int(positions[start]) for start, _ in request_token_spans]
        return OmniOutput(
            hidden, {"position": positions, "who": [s.get("who") for s in model_intermediate_buffer], "first": first}
        )


class ToyNotified(ToyMTP):
    """The same, told when requests have ended."""

    told: ClassVar = []

    def on_requests_finished(self, finished_req_ids):
        self.told.append(set(finished_req_ids))


class ToyStopping(Qwen2ForCausalLM):
    """The engine's token only says whether the model goes on: ``GO``, or ``STOP`` once the codes it has drawn add up to ``limit``.

    A position's code is ``argmax(hidden[:16])``. What was drawn stands in the state, by position, so that a replay finds it again.
    """

    supports_multi_step_decode = True
    STOP, GO = 5, 6

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None, **kwargs):
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds), positions

    def make_omni_output(self, model_outputs, *, model_intermediate_buffer, request_token_spans, **kwargs):
        hidden, positions = model_outputs
        flags, codes = hidden.clone(), []
        for state, (start, end) in zip(model_intermediate_buffer, request_token_spans, strict=True):
            drawn = state.setdefault("drawn", {})
            for row in range(start, end):
                if int(positions[row]) >= state["length"]:
                    drawn[int(positions[row])] = int(hidden[row, :16].argmax())
            state["finished"] = sum(drawn.values()) >= state["limit"]
            flags[end - 1, 0] = 1.0 if state["finished"] else -1.0
            codes.append(torch.tensor([drawn.get(int(positions[end - 1]), -1)]))
        return OmniOutput(flags, {"code": codes, "meta.turn_end": [state["finished"] for state in model_intermediate_buffer]})

    def compute_logits(self, hidden_states):
        logits = torch.full((len(hidden_states), 64), -5.0)
        logits[:, self.STOP], logits[:, self.GO] = hidden_states[:, 0], -hidden_states[:, 0]
        return logits

    def derive_engine_tokens(self, *, req_infos):
        tokens = [(self.STOP if info["finished"] else self.GO) if info.get("sure", True) else None for info in req_infos]
        return tokens[1:] if req_infos[0].get("short") else tokens


class ToyStatic(ToyExporting):
    """The same from storage that every step writes anew, as a captured graph does. A marked request spoils the rows' shape past ``at``."""

    storage = None

    def make_omni_output(self, model_outputs, *, model_intermediate_buffer, request_token_spans, **kwargs):
        hidden, positions = model_outputs
        count = len(positions)
        if self.storage is None:
            self.storage = {
                "position": positions.new_zeros(256),
                "row": hidden.new_zeros(HIDDEN, 256),
                "last": hidden.new_zeros(8, HIDDEN),
            }
        for held in self.storage.values():
            held.fill_(-1)
        self.storage["position"][:count] = positions
        self.storage["row"][:, :count] = hidden[:count].T
        ends = [end - 1 for _, end in request_token_spans]
        self.storage["last"][: len(ends)] = hidden[ends]
        values = {
            "position": self.storage["position"][: count + 3],
            "row": self.storage["row"].T,  # not contiguous, and padded
            "last": list(self.storage["last"][: len(ends)]),
            "given": OwnedBatchTensor(positions * 2),
        }
        for state, (start, _) in zip(model_intermediate_buffer, request_token_spans, strict=True):
            if "at" in state and positions[start] >= state["at"]:
                values["given"] = OwnedBatchTensor(torch.stack([positions, positions], 1))
        return OmniOutput(hidden, values)


class ToyVocoder(torch.nn.Module):
    """Sample ``p`` is ``1000 * codes[p - 1] + codes[p]``: one frame of left context, read from the state by absolute position."""

    is_attention_free = True

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        self.calls = []

    def embed_input_ids(self, input_ids):
        return torch.zeros(len(input_ids), HIDDEN)

    def compute_logits(self, hidden_states):
        return hidden_states

    def load_weights(self, weights):
        return set()

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None, **kwargs):
        states, spans = kwargs.get("model_intermediate_buffer", ()), kwargs.get("request_token_spans", ())
        self.calls.append([end - start for start, end in spans])
        waveforms = []
        for state, (start, end) in zip(states, spans, strict=True):
            first, codes = state[NUM_COMPUTED_TOKENS], state["codes"]
            kind = faulty(state, "forward", first + end - start - 1)
            if kind == "raise":
                raise Boom("marked request")
            if kind == "type":
                return None
            now = codes[first : first + end - start]
            assert len(now) == end - start
            before = torch.cat([torch.zeros(1, dtype=codes.dtype), codes])[first : first + end - start]
            waveforms.append((1000 * before + now).float())
            if kind == "count":
                waveforms.append(waveforms[-1])
        return OmniOutput(torch.zeros(len(positions), 1), {WAVEFORM: waveforms, SAMPLE_RATE: [16000] * len(states)})


class ToyStaticVocoder(ToyVocoder):
    """The same from storage that every forward writes anew."""

    storage = torch.zeros(8, 256)

    def forward(self, *args, **kwargs):
        result = super().forward(*args, **kwargs)
        if result is None:
            return None
        waveforms = result.multimodal_outputs[WAVEFORM]
        self.storage.fill_(-1)
        for kept, samples in zip(self.storage, waveforms, strict=False):
            kept[: len(samples)] = samples
        parts = [kept[: len(samples)] for kept, samples in zip(self.storage, waveforms, strict=False)]
        return OmniOutput(result.text_hidden_states, {**result.multimodal_outputs, WAVEFORM: parts})


class ToyAdapter:
    """Chunks hold ``ids`` (a prompt, or frames); frames also enter the state, all so far. ``ready`` is passed on, ``bad`` raises."""

    held: dict[str, list[int]]

    def __init__(self, checkpoint):
        self.held = {}

    def accept(self, request, chunk):
        if chunk.data.get("bad"):
            raise Boom("unreadable chunk")
        ids = list(chunk.data.get("ids", ()))
        codes = self.held.setdefault(request.req_id, [])
        codes += ids
        payload = {"codes": torch.tensor(codes, dtype=torch.int64), **chunk.data.get("payload", {})}
        return StageInput(
            prompt_token_ids=ids,
            payload=payload,
            end=chunk.end,
            sampling=chunk.data.get("sampling", {}),
            ready=chunk.data.get("ready"),
        )

    def drop(self, req_id):
        self.held.pop(req_id, None)


MODELS = {
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "ToyConditioned": ToyConditioned,
    "ToyScalar": ToyScalar,
    "ToyMTP": ToyMTP,
    "ToyNotified": ToyNotified,
    "ToyStopping": ToyStopping,
    "ToyExporting": ToyExporting,
    "ToyStatic": ToyStatic,
    "ToyVocoder": ToyVocoder,
    "ToyStaticVocoder": ToyStaticVocoder,
}


def register_toys():
    for name, model in MODELS.items():
        if name.startswith("Toy"):
            ModelRegistry.register_model(name, model)
