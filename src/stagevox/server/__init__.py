"""The OpenAI-compatible HTTP server over a running pipeline. Imports neither torch nor vLLM."""
