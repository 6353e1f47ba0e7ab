"""Independent oracle of the packaged model: text -> codes -> 16 kHz wav in pure torch, without vLLM or stagevox.

Greedy or sampled, KV cache, span-wise replay, chunked Code2Wav. It came with the voice; only loading was adjusted, to read
the packaged layout (``weights/talker`` and ``weights/code2wav``).

  python mini_reference.py --text "seven plus three is ten" --out out.wav
  python mini_reference.py --check        # replay in spans and chunked decode must reproduce the step-by-step result

Talker step t : input = sum_q codec_embedding[q][frame[t-1][q]] + text_embedding[row(P+1+t)]      (ONE text row per step)
Row k         : text id k; then one EOS row; then PAD rows for ever (stateless: a row depends on its absolute index only).
Prompt        : [speaker] [row 0 + codec PAD] ... [row P-1 + codec PAD] [row P + codec BOS]   -> predicts frame 0.
Groups 1..Q-1 : code predictor (MTP) from the talker's hidden state and the codes already chosen for the frame.
"""
import argparse, json, math, os, struct, wave
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

HERE = os.path.dirname(os.path.abspath(__file__))
WEIGHTS = os.path.join(HERE, "..", "..", "src", "stagevox", "models", "mini", "weights")


class TinyOmni:
    def __init__(self, path=WEIGHTS, dtype=torch.float32):
        def read(*name):
            with open(os.path.join(path, *name)) as f:
                return json.load(f)

        t, c, tk = read("talker", "config.json"), read("code2wav", "config.json"), read("talker", "tokenizer.json")
        t |= {"rope_theta": t["rope_parameters"]["rope_theta"], "num_code_groups": len(t["codebook_sizes"])}
        self.cfg = {"talker": t, "code_predictor": {"num_layers": t["predictor_layers"]}, "code2wav": c, "sample_rate": c["sample_rate"]}
        self.words, self.eos_text, self.pad_text = tk["words"], tk["eos_id"], tk["pad_id"]
        self.w = {}
        for stage in ("talker", "code2wav"):
            for k, v in load_file(os.path.join(path, stage, "model.safetensors")).items():
                self.w[k] = v.to(dtype) if v.is_floating_point() else v
        t = self.cfg["talker"]
        self.Q, self.P, self.H = t["num_code_groups"], t["prompt_text_rows"], t["num_attention_heads"]
        self.hd = t["hidden_size"] // self.H
        self.inv_freq = t["rope_theta"] ** -(torch.arange(self.hd // 2) / (self.hd // 2))
        self.c_eos, self.c_bos, self.c_pad = t["codec_eos_id"], t["codec_bos_id"], t["codec_pad_id"]

    # ---- text ---------------------------------------------------------------------------------------------------
    def tokenize(self, text):
        words = "".join(c if c.isalpha() else " " for c in text.lower()).split()
        bad = [x for x in words if x not in self.words]
        if bad:
            raise ValueError(f"out of vocabulary: {bad}")
        return [i for x in words for i in self.words[x]] + [self.eos_text]

    def row_ids(self, ids, start, n):
        """ids of text rows start..start+n-1 (absolute index; PAD after the EOS row)"""
        return torch.tensor([ids[k] if k < len(ids) else self.pad_text for k in range(start, start + n)])

    # ---- talker -------------------------------------------------------------------------------------------------
    def norm(self, x, g):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.cfg["talker"]["rms_norm_eps"]) * g

    def rope(self, x, pos):
        a = pos[:, None].to(self.inv_freq.dtype) * self.inv_freq
        c, s = a.cos().to(x.dtype), a.sin().to(x.dtype)
        x1, x2 = x.chunk(2, -1)
        return torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], -1)

    def talker(self, x, kv):
        """x [n, d] = the next n positions; kv = list with one [k, v] pair per layer (grows); returns hidden [n, d]"""
        w, n = self.w, x.shape[0]
        past = kv[0][0].shape[1] if kv[0] else 0
        pos = torch.arange(past, past + n)
        mask = torch.ones(n, past + n, dtype=torch.bool).tril(past)          # explicit: row i sees keys 0..past+i
        for i in range(self.cfg["talker"]["num_hidden_layers"]):
            p = f"talker.layers.{i}."
            q, k, v = F.linear(self.norm(x, w[p + "input_norm"]), w[p + "qkv"]).view(n, 3, self.H, self.hd).permute(1, 2, 0, 3)
            q, k = self.rope(q, pos), self.rope(k, pos)
            if kv[i]:
                k, v = torch.cat([kv[i][0], k], 1), torch.cat([kv[i][1], v], 1)
            kv[i] = [k, v]
            s = (q @ k.transpose(1, 2)) / math.sqrt(self.hd)
            y = s.masked_fill(~mask, float("-inf")).softmax(-1) @ v
            x = x + F.linear(y.transpose(0, 1).reshape(n, -1), w[p + "o"])
            gate, up = F.linear(self.norm(x, w[p + "post_norm"]), w[p + "gate_up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, w[p + "down"])
        return self.norm(x, w["talker.norm"])

    def new_kv(self):
        return [[] for _ in range(self.cfg["talker"]["num_hidden_layers"])]

    def frame_embedding(self, codes):
        return sum(self.w[f"talker.codec_embedding.{q}"][codes[..., q]] for q in range(self.Q))

    def prompt(self, ids):
        codec = torch.tensor([self.c_pad] * self.P + [self.c_bos])
        rows = self.w["talker.text_embedding"][self.row_ids(ids, 0, self.P + 1)] + self.w["talker.codec_embedding.0"][codec]
        return torch.cat([self.w["talker.speaker"][None], rows])

    def step_inputs(self, ids, codes, start):
        """inputs that carry frames start..start+len(codes)-1 (frame f is fed together with text row P+1+f)"""
        return self.frame_embedding(codes) + self.w["talker.text_embedding"][self.row_ids(ids, self.P + 1 + start, len(codes))]

    # ---- code predictor (MTP) -----------------------------------------------------------------------------------
    def predict_groups(self, h, c0, pick):
        w, p = self.w, "code_predictor."
        u = F.linear(h, w[p + "in.weight"], w[p + "in.bias"])
        codes = [c0]
        for q in range(self.Q - 1):
            u = u + w[p + f"embedding.{q}"][codes[-1]]
            z = u + w[p + "group_bias"][q]
            for i in range(self.cfg["code_predictor"]["num_layers"]):
                y = self.norm(z, w[p + f"blocks.{i}.norm"])
                y = F.silu(F.linear(y, w[p + f"blocks.{i}.fc1.weight"], w[p + f"blocks.{i}.fc1.bias"]))
                z = z + F.linear(y, w[p + f"blocks.{i}.fc2.weight"], w[p + f"blocks.{i}.fc2.bias"])
            z = self.norm(z, w[p + "norm"])
            codes.append(pick(F.linear(z, w[p + f"head.{q}.weight"], w[p + f"head.{q}.bias"])))
        return codes

    # ---- generation ---------------------------------------------------------------------------------------------
    @torch.no_grad()
    def generate(self, text, temperature=0.0, top_k=20, seed=0, max_frames=None, row_index=lambda k: k):
        """codes [T, Q]; row_index lets a test feed a wrong text row on purpose"""
        ids, kv, out = self.tokenize(text), self.new_kv(), []
        g = torch.Generator().manual_seed(seed)

        def pick(lg, temp=0.0):
            if temp <= 0:
                return int(lg.argmax())
            v, i = (lg / temp).topk(min(top_k, len(lg)))
            return int(i[torch.multinomial(v.softmax(-1), 1, generator=g)])

        h = self.talker(self.prompt(ids), kv)[-1]
        for f in range(max_frames or self.cfg["talker"]["max_frames"]):
            c0 = pick(F.linear(h, self.w["talker.lm_head"]), temperature)
            if c0 == self.c_eos:
                break
            out.append(self.predict_groups(h, c0, pick))
            x = self.frame_embedding(torch.tensor([out[-1]])) + self.w["talker.text_embedding"][self.row_ids(ids, row_index(self.P + 1 + f), 1)]
            h = self.talker(x, kv)[-1]
        return torch.tensor(out, dtype=torch.long).reshape(-1, self.Q)

    @torch.no_grad()
    def replay(self, text, codes, span):
        """re-feed prompt + whole history in spans of `span` positions with a KV cache; returns the greedy layer-0 choices"""
        ids, kv = self.tokenize(text), self.new_kv()
        x = torch.cat([self.prompt(ids), self.step_inputs(ids, codes, 0)])
        h = torch.cat([self.talker(x[i:i + span], kv) for i in range(0, len(x), span)])
        return F.linear(h[self.P + 1:], self.w["talker.lm_head"]).argmax(-1)

    # ---- code2wav -----------------------------------------------------------------------------------------------
    def cnx(self, x, p):
        w, k = self.w, self.w[p + "dw.weight"].shape[-1]
        y = F.conv1d(F.pad(x.transpose(1, 2), (k - 1, 0)), w[p + "dw.weight"], w[p + "dw.bias"], groups=x.shape[-1]).transpose(1, 2)
        y = F.layer_norm(y, (y.shape[-1],), w[p + "norm.weight"], w[p + "norm.bias"])
        y = F.linear(F.gelu(F.linear(y, w[p + "fc1.weight"], w[p + "fc1.bias"])), w[p + "fc2.weight"], w[p + "fc2.bias"])
        return x + w[p + "scale"] * y

    def decode_codes(self, c):
        """[T, Q] -> [T*640]; causal: sample n depends on codes <= n // 640 only"""
        w, cfg = self.w, self.cfg["code2wav"]
        x = sum(w[f"code2wav.embedding.{q}"][c[:, q]] for q in range(self.Q))[None]
        for i in range(cfg["pre_layers"]):
            x = self.cnx(x, f"code2wav.pre.{i}.")
        x = F.linear(x, w["code2wav.up.weight"], w["code2wav.up.bias"]).view(1, len(c) * cfg["upsample"], -1)
        for i in range(cfg["post_layers"]):
            x = self.cnx(x, f"code2wav.post.{i}.")
        x = F.layer_norm(x, (x.shape[-1],), w["code2wav.norm.weight"], w["code2wav.norm.bias"])
        m, ph = F.linear(x, w["code2wav.head.weight"], w["code2wav.head.bias"]).float().chunk(2, -1)
        m, n, hop = torch.exp(m.clamp(max=5.0) - 1), cfg["n_fft"], cfg["hop"]
        y = torch.fft.irfft(torch.complex(m * ph.cos(), m * ph.sin()), n=n) * torch.hann_window(n)
        t = y.shape[1]
        o = F.fold(y.transpose(1, 2), (1, n + (t - 1) * hop), (1, n), stride=(1, hop)).reshape(-1)
        return o[:t * hop] / cfg["ola_gain"]

    @torch.no_grad()
    def code2wav(self, codes, chunk=0):
        """wave of len(codes)*640 samples; silence codes warm the causal net up; output is one code late, so one code flushes it"""
        cfg = self.cfg["code2wav"]
        sil = torch.tensor([cfg["silence_codes"]])
        c = torch.cat([sil.repeat(cfg["warmup_codes"], 1), codes, sil])
        hop, left = cfg["samples_per_code"], cfg["left_context_codes"]
        step = chunk or len(c)
        out = []
        for i in range(0, len(c), step):
            a = max(0, i - left)
            out.append(self.decode_codes(c[a:i + step])[(i - a) * hop:])
        return torch.cat(out)[cfg["warmup_codes"] * hop + cfg["delay_samples"]:]


def write_wav(path, y, rate):
    pcm = (y.clamp(-1, 1) * 32767).round().to(torch.int16).tolist()
    with wave.open(path, "wb") as f:
        f.setnchannels(1), f.setsampwidth(2), f.setframerate(rate)
        f.writeframes(struct.pack(f"<{len(pcm)}h", *pcm))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--text", default="hello good morning")
    ap.add_argument("--out", default="out.wav")
    ap.add_argument("--temperature", type=float, default=0.0)
    ap.add_argument("--check", action="store_true")
    a = ap.parse_args()
    m = TinyOmni()
    codes = m.generate(a.text, a.temperature)
    wav = m.code2wav(codes)
    if a.check:
        want = torch.cat([codes[:, 0], torch.tensor([m.c_eos])])
        for span in (1, 3, 7, 16, 10 ** 6):
            got = m.replay(a.text, codes, span)
            print("span", span, "layer-0 equal", int((got == want).sum()), "/", len(want))
        for chunk in (1, 4, 10, 25):
            print("chunk", chunk, "max abs diff", float((m.code2wav(codes, chunk) - wav).abs().max()))
    write_wav(a.out, wav, m.cfg["sample_rate"])
    print(f"{len(codes)} frames, {len(wav) / m.cfg['sample_rate']:.2f} s -> {a.out}")


if __name__ == "__main__":
    main()
