"""`engine.backward`: a mean loss is passed back as a sum, in a loop that is watched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pdpsgd import PdpsgdError
from pdpsgd.engine.optimizer import PrivateOptimizer

Pass = Callable[[Any, Tensor], None]


def by_the_engine(run: Any, loss: Tensor) -> None:
    run.engine.backward(loss)


def by_itself(run: Any, loss: Tensor) -> None:
    loss.backward()


def train(
    run: Any,
    back: Pass,
    change: Callable[[Tensor], Tensor] = lambda outputs: outputs,
    reduction: str = "mean",
) -> None:
    for inputs, targets in run.loader:
        run.optimizer.zero_grad()
        back(run, nn.functional.cross_entropy(change(run.module(inputs)), targets, reduction=reduction))
        run.optimizer.step()


def bits_of_people(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, int], set[bytes]]:
    """What each person's gradient is in the steps that come, by its bytes; kernels may round each lane by itself."""
    found: dict[tuple[int, int], set[bytes]] = {}
    whole = PrivateOptimizer._add

    def noting(self: Any, batch: Any) -> None:
        gradients = self._gradients.per_example_gradients(loss_reduction=self._loss_reduction)
        rows = torch.cat([part.flatten(1) for part in gradients.values()], 1)
        for place, person in enumerate(batch.records.tolist()):
            if person >= 0:
                found.setdefault((person, place % 4), set()).add(rows[place].numpy().tobytes())
        whole(self, batch)

    monkeypatch.setattr(PrivateOptimizer, "_add", noting)
    return found


@pytest.mark.parametrize(("back", "alike"), [(by_the_engine, True), (by_itself, False)])
def test_a_persons_gradient_has_the_same_bits_in_batches_of_any_size(
    private, helpers, monkeypatch, back, alike
):
    found = bits_of_people(monkeypatch)
    run = private(plan=helpers.plan(people=200, rates=(0.3,), steps=12), data=helpers.data(200), seed=1)
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0  # weights stay the same
    train(run, back)
    seen_often = [each for each in found.values() if len(each) > 1]
    assert len(found) > 150
    assert (not seen_often) == alike


def test_it_trains_to_what_an_ordinary_pass_trains_to(private, flat):
    results = []
    for back in (by_the_engine, by_itself):
        run = private(seed=5)
        train(run, back)
        results.append(flat(run.module))
    torch.testing.assert_close(*results)


def test_a_sum_is_passed_back_as_it_is(private, flat):
    results = []
    for back in (by_the_engine, by_itself):
        run = private(seed=5, loss_reduction="sum")
        train(run, back, reduction="sum")
        results.append(flat(run.module))
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda outputs: outputs - outputs.mean(0), "Examples mix in the loss"),
        (lambda outputs: outputs * (len(outputs) / 16), "size"),
    ],
    ids=["mixes", "goes with the size"],
)
def test_what_is_refused_otherwise_is_refused_here(private, change, message):
    with pytest.raises(PdpsgdError, match=message):
        train(private(), by_the_engine, change)


def test_a_hook_that_changes_gradients_is_refused_here_too(private):
    def hooked(outputs: Tensor) -> Tensor:
        outputs.register_hook(lambda gradient: gradient / gradient.norm())
        return outputs

    with pytest.raises(PdpsgdError, match=r"a hook \(register_hook\)"):
        train(private(), by_the_engine, hooked)


def test_a_sum_that_was_called_a_mean_is_refused_here_too(private):
    with pytest.raises(PdpsgdError, match="Got one that is a sum"):
        train(private(), by_the_engine, reduction="sum")


def test_a_gradient_of_ones_own_is_not_seen_through_as_before(private):
    with pytest.warns(UserWarning, match="was given a gradient"):
        train(private(), lambda _, loss: loss.backward(torch.tensor(1.0)))
