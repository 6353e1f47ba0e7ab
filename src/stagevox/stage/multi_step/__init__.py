"""Merged decode: several decode steps in one scheduling round, the same tokens (MS-1 to MS-13)."""
