"""What was decided at each generated position."""

import pytest
import torch

from stagevox.stage.frame_log import FrameLog

pytestmark = pytest.mark.covers("PC-14")


def log_of(prompt, positions, hidden=2):
    log = FrameLog(prompt)
    for position in positions:
        step = torch.arange(3).float()[:, None].expand(3, hidden) + 10 * position
        log.append(position, step.clone(), (step[:, :1] + 5).long(), position % 3)
    return log


def expected(position):
    return [10.0 * position + position % 3] * 2


def test_positions_from_the_prompt_on():
    log = log_of(4, [4, 5, 6])
    assert [position in log for position in range(3, 8)] == [False, True, True, True, False]
    assert log.end == 7
    assert log.codes().tolist() == [[10 * p + p % 3 + 5] for p in (4, 5, 6)]


@pytest.mark.parametrize("first", [0, 2, 4, 5, 6])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_fill_touches_logged_rows_only(first, count):
    out = torch.full((count, 2), -1.0)
    log_of(4, [4, 5, 6]).fill(out, first)
    for offset, filled in enumerate(out.tolist()):
        position = first + offset
        assert filled == (expected(position) if position in (4, 5, 6) else [-1.0] * 2)


def test_a_gap_is_not_in_the_log():
    log = log_of(4, [4, 7])
    assert [position in log for position in range(4, 9)] == [True, False, False, True, False]
    out = torch.full((4, 2), -1.0)
    log.fill(out, 4)
    assert out.tolist() == [expected(4), [-1.0] * 2, [-1.0] * 2, expected(7)]
    assert len(log.codes()) == 2


@pytest.mark.parametrize("position", [3, 4, 5])
def test_a_position_is_logged_once(position):
    log = log_of(4, [4, 5])
    with pytest.raises(AssertionError, match=f"position {position} logged out of order, expected 6"):
        log.append(position, torch.zeros(1, 2), torch.zeros(1, 1), 0)


def test_logging_copies_nothing():
    log, embeds = FrameLog(0), torch.tensor([[1.0, 1.0], [2.0, 2.0]])
    log.append(0, embeds, torch.zeros(2, 1), 1)
    embeds[1] = 9.0
    out = torch.zeros(1, 2)
    log.fill(out, 0)
    assert out.tolist() == [[9.0, 9.0]]
