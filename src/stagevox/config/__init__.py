"""A model's stages (in code) and an operator's settings for them."""
