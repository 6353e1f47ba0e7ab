"""Qwen3-TTS, the CustomVoice models with the 12 Hz speech tokenizer: text to codec frames to samples."""
