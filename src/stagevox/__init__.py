"""stagevox: a serving runtime for models that think in text, then speak."""
