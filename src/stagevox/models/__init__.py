"""Model families, a folder each, and the registry that makes vLLM know them."""
