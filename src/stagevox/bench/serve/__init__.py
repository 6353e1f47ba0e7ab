"""``stagevox bench serve``: load on a running server, and what its users would have heard. Imports neither torch nor vLLM."""
