"""What the talkers of Qwen3-Omni and Qwen3-TTS share; each family adds its decoder and where its conditioning comes from."""
