"""Knows stages and requests, never tensors."""
