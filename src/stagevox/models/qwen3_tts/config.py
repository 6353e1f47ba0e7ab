"""The configs of Qwen3-TTS as transformers and vLLM load them; transformers has none of its own."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig


def _plain_rope(fields: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters without M-RoPE: of speech, all three axes stand at the same position, which is plain rotation."""
    given = fields.pop("rope_parameters", None) or fields.pop("rope_scaling", None) or {}
    fields.pop("rope_scaling", None)
    theta = given.get("rope_theta") or fields.pop("rope_theta", None) or 10000.0
    fields.pop("rope_theta", None)
    kept = {
        key: value for key, value in given.items() if key not in ("mrope_section", "interleaved", "mrope_interleaved", "type")
    }
    return {"rope_type": given.get("type", "default"), **kept, "rope_theta": theta}


class Qwen3TTSCodePredictorConfig(PretrainedConfig):
    """The code predictor, a small decoder over the groups of a frame."""

    model_type = "qwen3_tts_talker_code_predictor"

    def __init__(
        self,
        vocab_size: int = 2048,
        hidden_size: int = 1024,
        intermediate_size: int = 3072,
        num_hidden_layers: int = 5,
        num_attention_heads: int = 16,
        num_key_value_heads: int = 8,
        head_dim: int = 128,
        hidden_act: str = "silu",
        rms_norm_eps: float = 1e-6,
        attention_bias: bool = False,
        max_position_embeddings: int = 32768,
        num_code_groups: int = 32,
        **kwargs: Any,
    ) -> None:
        self.rope_parameters = _plain_rope(kwargs)
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.hidden_act = hidden_act
        self.rms_norm_eps = rms_norm_eps
        self.attention_bias = attention_bias
        self.max_position_embeddings = max_position_embeddings
        self.num_code_groups = num_code_groups
        super().__init__(**kwargs)


class Qwen3TTSTalkerConfig(PretrainedConfig):
    """The talker: a dense decoder over layer-0 codes, conditioned on text."""

    model_type = "qwen3_tts_talker"

    def __init__(
        self,
        code_predictor_config: dict[str, Any] | None = None,
        vocab_size: int = 3072,
        hidden_size: int = 1024,
        intermediate_size: int = 2048,
        num_hidden_layers: int = 20,
        num_attention_heads: int = 16,
        num_key_value_heads: int = 2,
        head_dim: int | None = None,
        hidden_act: str = "silu",
        rms_norm_eps: float = 1e-6,
        attention_bias: bool = False,
        max_position_embeddings: int = 32768,
        num_code_groups: int = 32,
        text_hidden_size: int = 2048,
        text_vocab_size: int = 151936,
        codec_eos_token_id: int = 2150,
        **kwargs: Any,
    ) -> None:
        self.rope_parameters = _plain_rope(kwargs)
        given = code_predictor_config or {}
        self.code_predictor_config = (
            given if isinstance(given, Qwen3TTSCodePredictorConfig) else Qwen3TTSCodePredictorConfig(**given)
        )
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.hidden_act = hidden_act
        self.rms_norm_eps = rms_norm_eps
        self.attention_bias = attention_bias
        self.max_position_embeddings = max_position_embeddings
        self.num_code_groups = num_code_groups
        self.text_hidden_size = text_hidden_size
        self.text_vocab_size = text_vocab_size
        self.codec_eos_token_id = codec_eos_token_id
        kwargs["tie_word_embeddings"] = False
        super().__init__(**kwargs)


class Qwen3TTSConfig(PretrainedConfig):
    """A whole checkpoint; stages are made of its parts."""

    model_type = "qwen3_tts"
    sub_configs = {"talker_config": Qwen3TTSTalkerConfig}  # noqa: RUF012 - transformers' own spelling

    def __init__(self, talker_config: dict[str, Any] | None = None, **kwargs: Any) -> None:
        given = talker_config or {}
        self.talker_config = given if isinstance(given, Qwen3TTSTalkerConfig) else Qwen3TTSTalkerConfig(**given)
        super().__init__(**kwargs)


class Qwen3TTSDecoderConfig(PretrainedConfig):
    """The 12 Hz speech tokenizer's decoder: codes to samples."""

    model_type = "qwen3_tts_tokenizer_12hz_decoder"

    def __init__(
        self,
        codebook_size: int = 2048,
        codebook_dim: int = 512,
        hidden_size: int = 1024,
        latent_dim: int = 1024,
        intermediate_size: int = 3072,
        num_hidden_layers: int = 8,
        num_attention_heads: int = 16,
        num_key_value_heads: int = 16,
        head_dim: int | None = None,
        hidden_act: str = "silu",
        rms_norm_eps: float = 1e-5,
        rope_theta: float = 10000.0,
        attention_bias: bool = False,
        sliding_window: int = 72,
        max_position_embeddings: int = 8000,
        num_quantizers: int = 16,
        upsample_rates: tuple[int, ...] = (8, 5, 4, 3),
        upsampling_ratios: tuple[int, ...] = (2, 2),
        decoder_dim: int = 1536,
        **kwargs: Any,
    ) -> None:
        kwargs.pop("model_type", None)
        self.codebook_size = codebook_size
        self.codebook_dim = codebook_dim
        self.hidden_size = hidden_size
        self.latent_dim = latent_dim
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.hidden_act = hidden_act
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.attention_bias = attention_bias
        self.sliding_window = sliding_window
        self.max_position_embeddings = max_position_embeddings
        self.num_quantizers = num_quantizers
        self.upsample_rates = list(upsample_rates)
        self.upsampling_ratios = list(upsampling_ratios)
        self.decoder_dim = decoder_dim
        super().__init__(**kwargs)


class Qwen3TTSTokenizerConfig(PretrainedConfig):
    """The 12 Hz speech tokenizer, as far as speech from codes needs it: its encoder stays unread."""

    model_type = "qwen3_tts_tokenizer_12hz"

    def __init__(
        self,
        decoder_config: dict[str, Any] | None = None,
        output_sample_rate: int = 24000,
        max_position_embeddings: int = 1 << 17,
        **kwargs: Any,
    ) -> None:
        kwargs.pop("encoder_config", None)
        given = decoder_config or {}
        self.decoder_config = given if isinstance(given, Qwen3TTSDecoderConfig) else Qwen3TTSDecoderConfig(**given)
        self.output_sample_rate = output_sample_rate
        # What vLLM wants to know of any model. Windows of frames start at position 0 again, so there may be many frames.
        self.vocab_size = self.decoder_config.codebook_size
        self.hidden_size = self.decoder_config.hidden_size
        self.num_hidden_layers = self.decoder_config.num_hidden_layers
        self.num_attention_heads = self.decoder_config.num_attention_heads
        self.num_key_value_heads = self.decoder_config.num_key_value_heads
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**kwargs)


def register_configs() -> None:
    """Make ``AutoConfig`` know the configs that stand in files; calling it again does nothing."""
    for config in (Qwen3TTSConfig, Qwen3TTSTokenizerConfig):
        AutoConfig.register(config.model_type, config, exist_ok=True)
