"""A loss function is told by made-up outputs: rows that mix are refused, whatever the private targets are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pdpsgd.engine.checks.loss import check_loss
from pdpsgd.errors import PdpsgdError

WEIGHTS = torch.tensor([1.0, 5.0, 20.0])
LOGITS = torch.linspace(-1, 1, 12).reshape(4, 3)
NUMBERS = torch.linspace(-2, 2, 4)[:, None]
ONE_CLASS = torch.zeros(60, dtype=torch.long)  # as in the first batch of imbalanced data
BINARY = (torch.arange(60) == 7).float()[:, None]
REAL = torch.linspace(-1, 1, 60)[:, None]

Loss = Callable[..., Tensor]


def weighted_by_hand(outputs: Tensor, targets: Tensor) -> Tensor:
    weights = 1 + 19 * targets
    losses = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
    return (losses * weights).sum() / weights.sum()


MIXING: dict[str, tuple[Loss, Tensor, Tensor]] = {
    "class weights": (lambda o, y: F.cross_entropy(o, y, weight=WEIGHTS), LOGITS, ONE_CLASS),
    "class weights of a module": (nn.CrossEntropyLoss(weight=WEIGHTS), LOGITS, ONE_CLASS),
    "one heavy class": (
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0, 100.0])),
        LOGITS,
        ONE_CLASS,
    ),
    "ignored class": (lambda o, y: F.cross_entropy(o, y, ignore_index=2), LOGITS, ONE_CLASS),
    "weights normalized by hand": (weighted_by_hand, NUMBERS, BINARY),
    "twice above twenty": (lambda o, y: F.cross_entropy(o, y) * (1 + (len(o) > 20)), LOGITS, ONE_CLASS),
    "root of the size": (lambda o, y: F.cross_entropy(o, y) * len(o) ** 0.5, LOGITS, ONE_CLASS),
    "root": (lambda o, y: F.cross_entropy(o, y).sqrt(), LOGITS, ONE_CLASS),
    "hardest": (lambda o, y: F.cross_entropy(o, y, reduction="none").max(), LOGITS, ONE_CLASS),
    "hardest half": (
        lambda o, y: F.cross_entropy(o, y, reduction="none").topk(len(o) // 2 + 1).values.mean(),
        LOGITS,
        ONE_CLASS,
    ),
    "a neighbour": (lambda o, y: F.triplet_margin_loss(o, o.roll(1, 0), o.roll(2, 0)), LOGITS, ONE_CLASS),
    "weights without gradient": (
        lambda o, y: (
            F.mse_loss(o, y, reduction="none") * ((o - y).abs() / (o - y).abs().mean()).detach()
        ).mean(),
        NUMBERS,
        REAL,
    ),
    "the first counts more": (
        lambda o, y: (F.mse_loss(o, y, reduction="none")[:, 0] * (1 + (torch.arange(len(o)) == 0))).mean(),
        NUMBERS,
        REAL,
    ),
    "correlation": (lambda o, y: -torch.corrcoef(torch.cat([o, y], 1).T)[0, 1] / len(o), NUMBERS, REAL),
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", MIXING)
def test_a_loss_in_which_rows_mix_is_refused_though_the_batch_would_not_show_it(
    name: str, reduction: str
) -> None:
    loss, outputs, targets = MIXING[name]
    with pytest.raises(PdpsgdError, match="Examples mix in this loss"):
        check_loss(loss, outputs, targets, rows=4, size=60, loss_reduction=reduction)


def evidence(outputs: tuple[Tensor, Tensor, Tensor], inputs: Tensor) -> Tensor:
    decoded, mean, deviation = outputs
    return F.mse_loss(decoded, inputs) - 0.5 * (1 + deviation - mean**2 - deviation.exp()).sum(1).mean()


def focal_in_single_precision(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(outputs.float(), targets, reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


WORDS = torch.arange(60 * 7).reshape(60, 7) % 3
MEANS: dict[str, tuple[Loss, object, Tensor]] = {
    "cross entropy": (F.cross_entropy, LOGITS, ONE_CLASS),
    "label smoothing": (nn.CrossEntropyLoss(label_smoothing=0.1), LOGITS, ONE_CLASS),
    "by its own size": (
        lambda o, y: F.cross_entropy(o, y, weight=WEIGHTS, reduction="sum") / len(y),
        LOGITS,
        ONE_CLASS,
    ),
    "log probabilities": (F.nll_loss, LOGITS.log_softmax(1), ONE_CLASS),
    "margin": (F.multi_margin_loss, LOGITS, ONE_CLASS),
    "focal": (focal_in_single_precision, LOGITS, ONE_CLASS),
    "squares": (F.mse_loss, NUMBERS, REAL),
    "huber": (nn.HuberLoss(), NUMBERS, REAL),
    "logits of yes": (F.binary_cross_entropy_with_logits, NUMBERS, BINARY),
    "probability of yes": (F.binary_cross_entropy, NUMBERS.sigmoid(), BINARY),
    "weight of yes": (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([20.0])), NUMBERS, BINARY),
    "counts": (F.poisson_nll_loss, NUMBERS, (REAL > 0).float()),
    "words": (lambda o, y: F.cross_entropy(o.flatten(0, 1), y.flatten()), torch.randn(4, 7, 3), WORDS),
    "pixels": (F.cross_entropy, torch.randn(4, 3, 7), WORDS),
    "variational": (
        evidence,
        (torch.randn(4, 5), torch.randn(4, 2), torch.randn(4, 2)),
        torch.randn(60, 5),
    ),
}
SUMS: dict[str, tuple[Loss, object, Tensor]] = {
    "sum": (nn.CrossEntropyLoss(reduction="sum"), LOGITS, ONE_CLASS),
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum"), LOGITS, ONE_CLASS),
    "ignored class": (nn.CrossEntropyLoss(ignore_index=2, reduction="sum"), LOGITS, ONE_CLASS),
    "mean times size over a constant": (
        lambda o, y: F.cross_entropy(o, y) * len(y) / 64,
        LOGITS,
        ONE_CLASS,
    ),
}


@pytest.mark.parametrize("said", ["mean", "sum"])
@pytest.mark.parametrize("name", [*MEANS, *SUMS])
def test_an_ordinary_loss_passes_as_what_it_is(name: str, said: str) -> None:
    truly, (loss, outputs, targets) = ("mean", MEANS[name]) if name in MEANS else ("sum", SUMS[name])
    if said == truly:
        assert check_loss(loss, outputs, targets, rows=4, size=60, loss_reduction=said)
        return
    with pytest.raises(PdpsgdError, match=f'Got one that is a {truly}: .*loss_reduction="{truly}"'):
        check_loss(loss, outputs, targets, rows=4, size=60, loss_reduction=said)


def test_padding_among_the_targets_is_tried_where_it_occurs() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    padded = WORDS.clone()
    padded[11, 3:] = -100
    outputs = torch.randn(4, 7, 3)
    assert check_loss(loss, outputs, WORDS, rows=4, size=60)
    with pytest.raises(PdpsgdError, match="Examples mix in this loss"):
        check_loss(loss, outputs, padded, rows=4, size=60)


def test_no_private_value_decides() -> None:
    """The verdict, and its words, are the same for batches with nothing in common but their kind."""
    found = []
    for seed in range(3):
        torch.manual_seed(seed)
        targets = torch.full((60,), seed)
        with pytest.raises(PdpsgdError) as refused:
            check_loss(nn.CrossEntropyLoss(weight=WEIGHTS), torch.randn(4, 3), targets, rows=4, size=60)
        found.append(str(refused.value))
    assert len(set(found)) == 1


@pytest.mark.parametrize(
    ("loss", "outputs"),
    [
        (lambda o, y: o["loss"], {"loss": torch.ones(()), "logits": LOGITS}),
        (lambda o, y: F.cross_entropy(F.dropout(o), y), LOGITS),
        (lambda o, y: F.cross_entropy(o, y) if o.sum() == LOGITS.sum() else None, LOGITS),
    ],
    ids=["the model's own", "random", "raises"],
)
def test_where_made_up_outputs_tell_nothing_nothing_is_refused(loss: Loss, outputs: object) -> None:
    state = torch.get_rng_state()
    assert not check_loss(loss, outputs, ONE_CLASS, rows=4, size=60)
    assert torch.equal(state, torch.get_rng_state())


def test_a_loss_that_remembers_is_refused() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.ones(()))

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            losses = F.cross_entropy(outputs, targets, reduction="none")
            self.mean = 0.9 * self.mean + 0.1 * losses.detach().mean()
            return (losses / self.mean).mean()

    loss = Running()
    with pytest.raises(PdpsgdError, match="when the loss is computed again"):
        check_loss(loss, LOGITS, ONE_CLASS, rows=4, size=60)
    assert float(loss.mean) == 1.0
