"""Benchmarks. Each compares two sides in one run and reports ratios; each writes its numbers with ``--json FILE``."""
