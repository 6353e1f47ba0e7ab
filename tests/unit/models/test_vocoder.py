"""Few lengths, and never a shorter one."""

from stagevox.models.vocoder import rounded


def test_lengths_are_few_and_near():
    lengths = range(1, 301)
    assert all(frames <= rounded(frames) < max(frames + 2, 1.25 * frames) for frames in lengths)
    assert len({rounded(frames) for frames in lengths}) <= 26
    assert all(rounded(rounded(frames)) == rounded(frames) for frames in lengths)
