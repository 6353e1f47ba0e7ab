"""Qwen3-Omni: a mixture-of-experts Thinker, a Talker with a code predictor, a causal vocoder."""
