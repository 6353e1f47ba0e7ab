"""Salts differ wherever conditioning does."""

import torch

from stagevox.models.salt import salt


def test_equal_conditioning_has_an_equal_salt():
    rows = torch.arange(6.0).view(2, 3)
    assert salt("Ethan", rows) == salt("Ethan", rows.clone()) == salt("Ethan", rows.T.contiguous().T)


def test_any_difference_is_seen():
    rows = torch.arange(6, dtype=torch.int32).view(2, 3)
    others = [rows + 1, rows.view(3, 2), rows.view(torch.float32), rows[:1]]
    salts = {
        salt("Ethan", rows),
        salt("Chelsie", rows),
        salt(("Ethan",), rows),
        salt("Ethan"),
        *(salt("Ethan", o) for o in others),
    }
    assert len(salts) == 8
