"""The adapter with the real package."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from pdpsgd import Budgets, PdpsgdError, Plan, PrivacyEngine, plan

lightning = pytest.importorskip("lightning", reason="the package lightning is not installed")

from pdpsgd.integrations._lightning_checks import check_trainer  # noqa: E402
from pdpsgd.integrations.lightning import make_private  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.rank_zero.LightningDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

PEOPLE = 60


class Classifier(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def training_step(self, batch: Any, index: int) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.network(inputs), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Mixing(Classifier):
    def training_step(self, batch: Any, index: int) -> Tensor:
        outputs = self.network(batch[0])
        return ((outputs - outputs.mean(0)) ** 2).mean()


class CallsItself(Classifier):
    """The customary way: a `forward`, and a `training_step` that calls the module."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.network(inputs)

    def prepared(self, inputs: Tensor) -> Tensor:
        return inputs

    def training_step(self, batch: Any, index: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self(self.prepared(inputs)), targets)


class Centres(CallsItself):
    def prepared(self, inputs: Tensor) -> Tensor:
        return inputs - inputs.mean(0)


class Scheduled(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.fixture
def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(PEOPLE, 4, generator=generator)
    return DataLoader(TensorDataset(inputs, (inputs[:, 0] > 0).long()), batch_size=10)


@pytest.fixture(scope="module")
def budgets() -> Budgets:
    return Budgets([1.0, 2.0, 4.0] * (PEOPLE // 3))


@pytest.fixture(scope="module")
def made(budgets: Budgets) -> Plan:
    return plan(budgets, steps=12, batch_size=6)


def trainer(**options: Any) -> Any:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lightning.Trainer(accelerator="cpu", devices=1, **{"max_epochs": 1, **quiet, **options})


def test_lightning_takes_exactly_the_plan_s_steps(loader: Any, budgets: Budgets, made: Plan) -> None:
    module: Any = make_private(Classifier(), data_loader=loader, plan=made, budgets=budgets, seed=3)
    trainer(max_epochs=3).fit(module)
    assert module.engine.steps_taken == 12
    assert module.engine.steps_left == 0


def test_people_may_have_many_records(loader: Any, made: Plan) -> None:
    people = Budgets([1.0, 2.0, 4.0] * 20)
    whose = torch.arange(PEOPLE).repeat_interleave(torch.arange(PEOPLE) % 3).numpy()  # none, one or two
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(len(whose), 4, generator=generator)
    module: Any = make_private(
        Classifier(),
        data_loader=(inputs, (inputs[:, 0] > 0).long()),
        plan=made,
        budgets=people,
        record_ids=whose,
        records_per_person=2,
        seed=3,
    )
    trainer().fit(module)
    assert module.engine.steps_left == 0


def test_lightning_gets_what_a_loop_of_one_s_own_gets(loader: Any, budgets: Budgets, made: Plan) -> None:
    module: Any = make_private(Classifier(), data_loader=loader, plan=made, budgets=budgets, seed=3)
    trainer().fit(module)

    own = Classifier()
    engine = PrivacyEngine(watch_loop=False)  # the loss is tried in the other run
    _, optimizer, batches = engine.make_private(
        module=own,
        optimizer=torch.optim.SGD(own.parameters(), lr=0.5),
        data_loader=loader,
        plan=made,
        budgets=budgets,
        seed=3,
    )
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(own.network(inputs), targets).backward()
        optimizer.step()
    for one, other in zip(module.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_training_step_may_call_its_own_module(loader: Any, budgets: Budgets, made: Plan) -> None:
    options = {"data_loader": loader, "plan": made, "budgets": budgets, "seed": 3}
    one, other = make_private(CallsItself(), **options), make_private(Classifier(), **options)
    for module in (one, other):
        trainer().fit(module)
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    refused = make_private(Centres(), **options)
    with pytest.raises(PdpsgdError, match="Examples mix"):
        trainer().fit(refused)


def test_epochs_of_a_few_steps_add_up_to_the_plan(loader: Any, budgets: Budgets, made: Plan) -> None:
    options = {"data_loader": loader, "plan": made, "budgets": budgets, "seed": 3, "steps_per_epoch": 4}
    module: Any = make_private(Classifier(), **options)
    trainer(max_epochs=3).fit(module)
    assert module.engine.steps_left == 0


def test_schedulers_keep_working(loader: Any, budgets: Budgets, made: Plan) -> None:
    module: Any = make_private(Scheduled(), data_loader=loader, plan=made, budgets=budgets, seed=3)
    trainer().fit(module)
    assert module.engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)


def test_a_training_step_in_which_examples_mix_is_refused(loader: Any, budgets: Budgets, made: Plan) -> None:
    module = make_private(Mixing(), data_loader=loader, plan=made, budgets=budgets, seed=3)
    with pytest.raises(PdpsgdError, match="Examples mix"):
        trainer().fit(module)


class Scaled(Classifier):
    """Scales its mean by the number of examples, over a constant."""

    def training_step(self, batch: Any) -> Any:
        inputs, targets = batch
        return nn.functional.cross_entropy(self.network(inputs), targets) * len(targets) / 64


class Weighted(Classifier):
    """Weights one class, in a mean over the weights; in a plain mean where `plain` is set."""

    plain = False

    def training_step(self, batch: Any) -> Any:
        inputs, targets = batch
        weights = 1.0 + 49 * (targets == 1)
        losses = nn.functional.cross_entropy(self.network(inputs), targets, reduction="none") * weights
        return losses.mean() if self.plain else losses.sum() / weights.sum()


def test_a_training_step_that_depends_on_its_size_or_weights_a_class_is_refused(
    loader: Any, budgets: Budgets, made: Plan
) -> None:
    for module, message in ((Scaled(), "is a sum"), (Weighted(), "Examples mix")):
        private = make_private(module, data_loader=loader, plan=made, budgets=budgets, seed=3)
        with pytest.raises(PdpsgdError, match=message):
            trainer().fit(private)
    module = Weighted()
    module.plain = True
    trainer().fit(make_private(module, data_loader=loader, plan=made, budgets=budgets, seed=3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_clip_val": 1.0}, "the plan clips"),
        ({"accumulate_grad_batches": 2}, "a step is one batch"),
        ({"precision": "bf16-mixed"}, "32 or 64 bits"),
        ({"precision": "16-true"}, "32 or 64 bits"),
    ],
)
def test_what_would_change_gradients_is_refused(
    loader: Any, budgets: Budgets, made: Plan, options: dict[str, Any], message: str
) -> None:
    module = make_private(Classifier(), data_loader=loader, plan=made, budgets=budgets)
    with pytest.raises(PdpsgdError, match=message):
        trainer(**options).fit(module)


def test_lightning_has_one_device() -> None:
    check_trainer(trainer())
    several = lightning.Trainer(accelerator="cpu", devices=2, logger=False)
    with pytest.raises(PdpsgdError, match=r"Expected one device with Lightning\. Got 2"):
        check_trainer(several)


class Evaluated(Classifier):
    def test_step(self, batch: Any, index: int) -> None:
        nn.functional.cross_entropy(self.network(batch[0]), batch[1])


def test_lightning_s_checkpoints_are_for_evaluation_not_for_training_on(
    loader: Any, budgets: Budgets, made: Plan, tmp_path: Any
) -> None:
    """Steps were taken again from the plan's beginning, under another key, and the promise was said to hold."""
    options = {"data_loader": loader, "plan": made, "budgets": budgets, "steps_per_epoch": 6}
    module: Any = make_private(Evaluated(), **options)
    first = trainer()
    first.fit(module)
    assert module.engine.steps_taken == 6
    first.save_checkpoint(tmp_path / "half.ckpt")
    again: Any = make_private(Evaluated(), **options)
    with pytest.raises(PdpsgdError, match="neither the run's key nor its place in the plan"):
        trainer(max_epochs=2).fit(again, ckpt_path=tmp_path / "half.ckpt", weights_only=False)
    fine = DataLoader(others(), batch_size=10)
    trainer().test(again, fine, ckpt_path=tmp_path / "half.ckpt", verbose=False, weights_only=False)
    for one, other in zip(again.parameters(), module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_plan_is_not_taken_twice(loader: Any, budgets: Budgets, made: Plan) -> None:
    module: Any = make_private(Classifier(), data_loader=loader, plan=made, budgets=budgets)
    trainer().fit(module)
    with pytest.raises(PdpsgdError, match="second one after 12 steps"):
        trainer().fit(module)
    assert module.engine.steps_taken == 12


class TwoOptimizers(Classifier):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.5), torch.optim.SGD(self.parameters(), lr=0.5)], []


def test_only_a_lightning_module_with_one_optimizer_is_made_private(
    loader: Any, budgets: Budgets, made: Plan
) -> None:
    options = {"data_loader": loader, "plan": made, "budgets": budgets}
    with pytest.raises(PdpsgdError, match=r"Expected a LightningModule\. Got Linear"):
        make_private(nn.Linear(4, 2), **options)
    manual = Classifier()
    manual.automatic_optimization = False
    with pytest.raises(PdpsgdError, match="Expected automatic optimization"):
        make_private(manual, **options)
    with pytest.raises(PdpsgdError, match=r"to give one optimizer\. Got 2"):
        trainer().fit(make_private(TwoOptimizers(), **options))


def test_a_module_is_made_private_once(loader: Any, budgets: Budgets, made: Plan) -> None:
    options = {"data_loader": loader, "plan": made, "budgets": budgets}
    module = make_private(Classifier(), **options)
    with pytest.raises(PdpsgdError, match="not private yet"):
        make_private(module, **options)
    with pytest.raises(PdpsgdError, match="number is secret"):
        make_private(Classifier(), **options, max_physical_batch_size=4)


class SquaredError(Classifier):
    """A mean that torch multiplies by 2 / n, which rounds."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.network(inputs)[:, 0], targets.float())


class Share(Classifier):
    """A share of a mean: n times 0.9 is rounded, and then divided by n."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        return 0.9 * super().training_step(batch, index)


class Summed(Classifier):
    def training_step(self, batch: Any, index: int) -> Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self.network(inputs), targets, reduction="sum")


class Bits(lightning.Callback):  # type: ignore[misc, name-defined]
    """Everybody's gradient, and how many rows there were, at every step."""

    def __init__(self, reduction: str) -> None:
        self.reduction, self.sizes, self.of_person = reduction, set[int](), dict[int, set[bytes]]()

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        engine = module.engine
        found = engine.gradients.per_example_gradients(loss_reduction=self.reduction)
        rows = torch.cat([part.flatten(1) for part in found.values()], 1)
        self.sizes.add(len(rows))
        for place, person in enumerate(engine.execution.current.records.tolist()):
            if person >= 0:
                self.of_person.setdefault(person, set()).add(rows[place].numpy().tobytes())


class Still(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.parametrize(
    ("kind", "reduction", "powers"),
    [
        (Classifier, "mean", False),
        (CallsItself, "mean", False),
        (Scheduled, "mean", False),
        (SquaredError, "mean", True),
        (Share, "mean", True),
        (Summed, "sum", False),
    ],
)
def test_a_training_step_is_tried_before_the_run_and_nothing_is_assumed_of_it(
    kind: Any, reduction: str, powers: bool, loader: Any, budgets: Budgets
) -> None:
    """Whoever else is sampled, a person's gradient has the same bits, also where the mean is over other numbers."""
    still = type("Still", (Still, kind), {"configure_optimizers": Still.configure_optimizers})
    often = plan(budgets, steps=30, batch_size=20)
    module: Any = make_private(
        still(), data_loader=loader, plan=often, budgets=budgets, loss_reduction=reduction
    )
    bits = Bits(reduction)
    trainer(callbacks=[bits]).fit(module)
    assert powers or len(bits.sizes) > 1
    assert len(bits.of_person) > PEOPLE // 2
    assert all(len(each) == 1 for each in bits.of_person.values())
    assert module.engine.execution.layout.powers == powers
    assert module.engine.verdict().sentences == (f"The promise holds for all {PEOPLE} people.",)


def test_a_training_step_that_cannot_be_tried_is_assumed_to_round_alike(
    loader: Any, budgets: Budgets, made: Plan
) -> None:
    class Asks(CallsItself):
        def training_step(self, batch: Any, index: int) -> Tensor:
            assert self.trainer.train_dataloader is not None, "there is none before the run"
            return super().training_step(batch, index)

    module = fitted(Asks, loader, budgets, made)
    (assumed,) = module.engine.verdict().assumed
    assert assumed.startswith("It is assumed that the loss rounds a row of its mean alike")


class Hooked(Classifier):
    """Does something to a batch, or to the loss, outside of `training_step`."""

    change: Any = None

    def changed(self, batch: Any) -> Any:
        inputs, targets = batch
        return type(self).change(inputs), targets


class BeforeTransfer(Hooked):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.changed(batch)


class AfterTransfer(Hooked):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self.changed(batch)


class Transfer(Hooked):
    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return self.changed(batch)


class InPlace(Hooked):
    def on_train_batch_start(self, batch: Any, index: int) -> None:
        batch[0].copy_(type(self).change(batch[0]))


class Exchanging(Hooked):
    def on_train_batch_start(self, batch: Any, index: int) -> None:
        batch[0] = type(self).change(batch[0])


class InACallback(lightning.Callback):  # type: ignore[misc, name-defined]
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        batch[0].mul_(0.5)


def fitted(kind: type, loader: Any, budgets: Budgets, made: Plan, **options: Any) -> Any:
    module: Any = make_private(kind(), data_loader=loader, plan=made, budgets=budgets, seed=3)
    trainer(**options).fit(module)
    return module


@pytest.mark.parametrize("kind", [BeforeTransfer, AfterTransfer, Transfer])
def test_hooks_that_transfer_batches_are_tried(
    kind: Any, loader: Any, budgets: Budgets, made: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "change", lambda inputs: (inputs - inputs.mean(0)) / 2)
    with pytest.raises(PdpsgdError, match="Examples mix"):
        fitted(kind, loader, budgets, made)
    monkeypatch.setattr(kind, "change", lambda inputs: (inputs - 0.5) / 2)
    assert fitted(kind, loader, budgets, made).engine.steps_left == 0


@pytest.mark.parametrize("kind", [InPlace, Exchanging])
def test_a_batch_that_is_changed_before_training_step_is_refused(
    kind: Any, loader: Any, budgets: Budgets, made: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "change", lambda inputs: 0.5 * inputs + 0.5 * inputs.roll(1, 0))
    with pytest.raises(PdpsgdError, match="training_step to get the batch as it was transferred"):
        fitted(kind, loader, budgets, made)


def test_a_batch_that_a_callback_changes_is_refused(loader: Any, budgets: Budgets, made: Plan) -> None:
    with pytest.raises(PdpsgdError, match="a callback or on_train_batch_start has changed"):
        fitted(Classifier, loader, budgets, made, callbacks=[InACallback()])


def test_a_backward_of_its_own_is_refused(loader: Any, budgets: Budgets, made: Plan) -> None:
    class Squares(Classifier):
        def backward(self, loss: Tensor) -> None:
            (loss * loss).backward()  # type: ignore[no-untyped-call]

    with pytest.raises(PdpsgdError, match=r"Expected Lightning's own backward\. Got one of Squares"):
        make_private(Squares(), data_loader=loader, plan=made, budgets=budgets)


class Validated(Classifier):
    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        self.log("other people's loss", nn.functional.cross_entropy(self.network(batch[0]), batch[1]))

    def val_dataloader(self) -> Any:
        inputs = torch.randn(20, 4, generator=torch.Generator().manual_seed(2))
        return DataLoader(TensorDataset(inputs, (inputs[:, 0] > 0).long()), batch_size=10)


class Evaluating(Validated):
    def test_step(self, batch: Any, index: int) -> None:
        self.validation_step(batch, index)


def others(people: int = 40) -> TensorDataset:
    inputs = torch.randn(people, 4, generator=torch.Generator().manual_seed(7))
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def copied(loader: Any) -> DataLoader[Any]:
    """The same records, elsewhere in memory, in another order, and with others among them."""
    mine = [part.flip(0)[:30] for part in loader.dataset.tensors]
    both = (torch.cat(parts) for parts in zip(mine, others(20).tensors, strict=True))
    return DataLoader(TensorDataset(*both), batch_size=10)


@pytest.mark.parametrize("sanity", [0, 2])
@pytest.mark.parametrize("changed", [lambda loader: loader, copied])
def test_people_to_validate_on_are_not_trained_on(
    changed: Any, sanity: int, loader: Any, budgets: Budgets, made: Plan
) -> None:
    module: Any = make_private(Evaluating(), data_loader=loader, plan=made, budgets=budgets)
    with pytest.raises(PdpsgdError, match="Expected other people to validate on, who are not trained on"):
        trainer(num_sanity_val_steps=sanity).fit(
            module, val_dataloaders=[DataLoader(others(), batch_size=10), changed(loader)]
        )
    assert module.engine.steps_taken == 0


def test_people_to_evaluate_on_before_and_after_a_run_are_not_trained_on(
    loader: Any, budgets: Budgets, made: Plan
) -> None:
    module: Any = make_private(Evaluating(), data_loader=loader, plan=made, budgets=budgets)
    fine, used = DataLoader(others(), batch_size=10), trainer()
    untrained = make_private(Evaluating(), data_loader=loader, plan=made, budgets=budgets)
    with pytest.raises(PdpsgdError, match="Expected other people to test on"):
        trainer().test(untrained, loader, verbose=False)
    used.test(module, fine, verbose=False)
    used.fit(module, val_dataloaders=fine)
    used.validate(module, fine, verbose=False)
    with pytest.raises(PdpsgdError, match="Expected other people to validate on"):
        used.validate(module, copied(loader), verbose=False)
    with pytest.raises(PdpsgdError, match="Expected other people to test on"):
        used.test(module, {"mine": loader}, verbose=False)


def test_nobody_is_validated_on_what_is_trained_on_by_an_option(
    loader: Any, budgets: Budgets, made: Plan
) -> None:
    with pytest.raises(PdpsgdError, match="Expected overfit_batches=0"):
        fitted(Validated, loader, budgets, made, overfit_batches=2)


def test_batches_come_from_the_plan_alone(loader: Any, budgets: Budgets, made: Plan) -> None:
    module: Any = make_private(Classifier(), data_loader=loader, plan=made, budgets=budgets)
    with pytest.raises(PdpsgdError, match="Got a training loader beside it"):
        trainer().fit(module, loader)


def test_nothing_decides_by_what_training_step_logs(loader: Any, budgets: Budgets, made: Plan) -> None:
    stopping = lightning.pytorch.callbacks.EarlyStopping
    with pytest.raises(PdpsgdError, match="Got EarlyStopping, which watches 'loss'"):
        fitted(Classifier, loader, budgets, made, callbacks=[stopping(monitor="loss")])
    watched = [stopping(monitor="other people's loss", check_on_train_epoch_end=False)]
    assert fitted(Validated, loader, budgets, made, callbacks=watched).engine.steps_left == 0


class LogsAfterwards(Classifier):
    """Training figures that are logged by a hook around training_step."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.last = super().training_step(batch, index)
        return self.last

    def on_train_epoch_end(self) -> None:
        self.log("at the end", float(self.last.detach()))


def test_figures_of_hooks_around_training_step_are_the_training_data_s_too(
    loader: Any, budgets: Budgets, made: Plan
) -> None:
    stopping = lightning.pytorch.callbacks.EarlyStopping(monitor="at the end")
    with pytest.raises(PdpsgdError, match="Got EarlyStopping, which watches 'at the end'"):
        fitted(LogsAfterwards, loader, budgets, made, callbacks=[stopping])


def test_files_that_loggers_write_of_the_training_data_are_named(
    loader: Any, budgets: Budgets, made: Plan, tmp_path: Any
) -> None:
    """`Trainer()` writes what training_step logs to lightning_logs/, without noise."""
    logger = lightning.pytorch.loggers.CSVLogger(tmp_path)
    options = {"data_loader": loader, "plan": made, "budgets": budgets}
    module: Any = make_private(Validated(), **options)
    with pytest.warns(UserWarning, match=r"'loss'\) follows from the private data.*CSVLogger") as told:
        trainer(logger=logger, log_every_n_steps=1).fit(module)
    assert len([each for each in told if "private data" in str(each.message)]) == 1
    verdict = module.engine.verdict()
    (said,) = verdict.beside
    assert str(tmp_path) in said
    assert said in verdict.sentences
    assert verdict.to_dict()["beside"] == [said]
    assert verdict.outcome == "holds for all"
    assert "loss" in (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()


class LogsNothing(Validated):
    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.log("loss", loss, logger=False)
        return loss


def test_loggers_of_other_people_s_figures_are_fine(
    loader: Any, budgets: Budgets, made: Plan, tmp_path: Any
) -> None:
    logger = lightning.pytorch.loggers.CSVLogger(tmp_path)
    naming = lightning.pytorch.callbacks.ModelCheckpoint(
        tmp_path / "kept", filename="{epoch}-{other people's loss:.2f}", monitor="other people's loss"
    )
    private: Any = make_private(LogsNothing(), data_loader=loader, plan=made, budgets=budgets)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*private data.*")
        warnings.filterwarnings("ignore", message=".*training batches.*")
        trainer(logger=logger, enable_checkpointing=True, callbacks=[naming]).fit(private)
    assert private.engine.verdict().sentences == (f"The promise holds for all {PEOPLE} people.",)
    assert "loss=" in naming.best_model_path


@pytest.mark.parametrize("name", ["{epoch}-{loss:.3f}", "{loss}", "at-{loss_step:.1f}"])
def test_no_file_is_named_by_what_training_step_logs(
    name: str, loader: Any, budgets: Budgets, made: Plan, tmp_path: Any
) -> None:
    naming = lightning.pytorch.callbacks.ModelCheckpoint(tmp_path, filename=name)
    with pytest.raises(PdpsgdError, match="Got ModelCheckpoint with filename="):
        fitted(Classifier, loader, budgets, made, callbacks=[naming], enable_checkpointing=True)
    assert not list(tmp_path.iterdir())


def test_no_rate_is_searched_for_on_the_private_data(loader: Any, budgets: Budgets, made: Plan) -> None:
    finding = lightning.pytorch.callbacks.LearningRateFinder()
    with pytest.raises(PdpsgdError, match="Got LearningRateFinder"):
        fitted(Classifier, loader, budgets, made, callbacks=[finding])


class Leaving(Classifier):
    """Leaves a batch out by what is in it, from some step on."""

    seen = 0

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        return None if index > 3 and bool((batch[0] > 0).any()) else loss


def test_no_batch_is_left_out_by_what_is_in_it(loader: Any, budgets: Budgets, made: Plan) -> None:
    with pytest.raises(PdpsgdError, match=r"to return a loss for every batch\. Got None"):
        fitted(Leaving, loader, budgets, made)


def test_records_are_no_hyperparameters(loader: Any, budgets: Budgets, made: Plan) -> None:
    class Remembering(Classifier):
        def __init__(self, data: Any, width: int = 8) -> None:
            super().__init__()
            self.save_hyperparameters()

    def private(data: Any) -> Any:
        return make_private(Remembering(data), data_loader=loader, plan=made, budgets=budgets)

    for data in (loader, loader.dataset, loader.dataset.tensors[0]):
        with pytest.raises(PdpsgdError, match="Expected hyperparameters without the records"):
            trainer().fit(private(data))
    module = private("a name")
    trainer().fit(module)
    assert module.engine.steps_left == 0


def test_manual_optimization_may_not_begin_later(loader: Any, budgets: Budgets, made: Plan) -> None:
    module: Any = make_private(Classifier(), data_loader=loader, plan=made, budgets=budgets)
    module.automatic_optimization = False
    with pytest.raises(PdpsgdError, match="since make_private"):
        trainer().fit(module)


def test_no_rate_follows_from_what_training_step_logs(loader: Any, budgets: Budgets, made: Plan) -> None:
    class Plateau(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}

    with pytest.raises(PdpsgdError, match="Got ReduceLROnPlateau, which watches 'loss'"):
        fitted(Plateau, loader, budgets, made)
