"""Samples: joined, encoded, written."""
