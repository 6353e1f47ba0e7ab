"""The road between stages."""
