"""A failure here says which release of torch changed what `integrations/_torch.py` relies on."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from pdpsgd.integrations import _torch


def test_a_scheduler_moves_to_a_wrapper_without_a_warning():
    wrapped = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(wrapped, step_size=1, gamma=0.5)
    wrapper = torch.optim.SGD(wrapped.param_groups, lr=1.0)
    wrapper.param_groups = wrapped.param_groups
    _torch.move_scheduler(scheduler, wrapper)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            wrapper.step()
            scheduler.step()
    except Warning as warning:
        raise AssertionError(
            f"torch {torch.__version__} changed Optimizer._opt_called or step._wrapped_by_lr_sched, which "
            f"pdpsgd/integrations/_torch.py uses as it was in torch {_torch.CHECKED_WITH}: {warning}"
        ) from warning
    assert wrapped.param_groups[0]["lr"] == 0.5
