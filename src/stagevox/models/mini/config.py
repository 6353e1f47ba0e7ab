"""The configs of the packaged model's own stages, as transformers and vLLM load them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import AutoConfig, PretrainedConfig


class MiniTalkerConfig(PretrainedConfig):
    """The Talker (a causal LM over codec frames) and its code predictor."""

    model_type = "stagevox_mini_talker"

    def __init__(
        self,
        hidden_size: int = 192,
        num_hidden_layers: int = 5,
        num_attention_heads: int = 6,
        num_key_value_heads: int = 6,
        head_dim: int = 32,
        intermediate_size: int = 416,
        hidden_act: str = "silu",
        rms_norm_eps: float = 1e-6,
        rope_parameters: dict[str, Any] | None = None,
        vocab_size: int = 515,
        max_position_embeddings: int = 192,
        voices: Sequence[str] = ("slt",),
        text_vocab_size: int = 575,
        text_eos_id: int = 573,
        text_pad_id: int = 574,
        prompt_text_rows: int = 4,
        codebook_sizes: Sequence[int] = (512, 256, 256, 256),
        codec_eos_id: int = 512,
        codec_bos_id: int = 513,
        codec_pad_id: int = 514,
        lm_head_size: int = 513,
        max_frames: int = 170,
        predictor_layers: int = 2,
        predictor_intermediate_size: int = 384,
        **kwargs: Any,
    ) -> None:
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.intermediate_size = intermediate_size
        self.hidden_act = hidden_act
        self.rms_norm_eps = rms_norm_eps
        self.rope_parameters = rope_parameters or {"rope_type": "default", "rope_theta": 2000.0}
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.voices = list(voices)
        self.text_vocab_size = text_vocab_size
        self.text_eos_id = text_eos_id
        self.text_pad_id = text_pad_id
        self.prompt_text_rows = prompt_text_rows
        self.codebook_sizes = list(codebook_sizes)
        self.codec_eos_id = codec_eos_id
        self.codec_bos_id = codec_bos_id
        self.codec_pad_id = codec_pad_id
        self.lm_head_size = lm_head_size
        self.max_frames = max_frames
        self.predictor_layers = predictor_layers
        self.predictor_intermediate_size = predictor_intermediate_size
        super().__init__(**kwargs)

    @property
    def prompt_len(self) -> int:
        """Positions of the prompt: the speaker, the text rows under codec PAD, and the row under codec BOS."""
        return self.prompt_text_rows + 2


class MiniCode2WavConfig(PretrainedConfig):
    """Code2Wav: a causal convolutional net from codec frames to samples."""

    model_type = "stagevox_mini_code2wav"

    def __init__(
        self,
        hidden_size: int = 192,
        num_hidden_layers: int = 6,
        num_attention_heads: int = 1,
        num_key_value_heads: int = 1,
        vocab_size: int = 512,
        max_position_embeddings: int = 192,
        sample_rate: int = 16000,
        frame_rate: int = 25,
        codebook_sizes: Sequence[int] = (512, 256, 256, 256),
        embedding_size: int = 256,
        pre_layers: int = 2,
        pre_kernel: int = 5,
        pre_intermediate_size: int = 512,
        post_layers: int = 4,
        post_kernel: int = 7,
        post_intermediate_size: int = 448,
        upsample: int = 4,
        n_fft: int = 640,
        hop: int = 160,
        ola_gain: float = 1.5,
        layer_norm_eps: float = 1e-5,
        samples_per_code: int = 640,
        delay_samples: int = 640,
        warmup_codes: int = 8,
        left_context_codes: int = 16,
        silence_codes: Sequence[int] = (307, 15, 15, 15),
        **kwargs: Any,
    ) -> None:
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.sample_rate = sample_rate
        self.frame_rate = frame_rate
        self.codebook_sizes = list(codebook_sizes)
        self.embedding_size = embedding_size
        self.pre_layers = pre_layers
        self.pre_kernel = pre_kernel
        self.pre_intermediate_size = pre_intermediate_size
        self.post_layers = post_layers
        self.post_kernel = post_kernel
        self.post_intermediate_size = post_intermediate_size
        self.upsample = upsample
        self.n_fft = n_fft
        self.hop = hop
        self.ola_gain = ola_gain
        self.layer_norm_eps = layer_norm_eps
        self.samples_per_code = samples_per_code
        self.delay_samples = delay_samples
        self.warmup_codes = warmup_codes
        self.left_context_codes = left_context_codes
        self.silence_codes = list(silence_codes)
        super().__init__(**kwargs)


def register_configs() -> None:
    """Make ``AutoConfig`` know both configs; calling it again does nothing."""
    for config in (MiniTalkerConfig, MiniCode2WavConfig):
        AutoConfig.register(config.model_type, config, exist_ok=True)
