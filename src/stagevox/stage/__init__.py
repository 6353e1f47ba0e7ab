"""One stage is one vLLM engine, extended by subclass. Import its modules directly; this package imports nothing."""
