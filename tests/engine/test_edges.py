"""Edges of the promise: precision, compiled modules, datasets that are not what they seem, keys that outlive a run."""

from __future__ import annotations

import contextlib
import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

from pdpsgd.engine import PrivacyEngine
from pdpsgd.engine.checkpoints import load, save
from pdpsgd.engine.fingerprints import fingerprint_data
from pdpsgd.errors import PdpsgdError
from pdpsgd.gradients.clipping import ClippedGradients
from pdpsgd.gradients.layers import Layers
from pdpsgd.gradients.native import dispatch as native
from pdpsgd.sampling.source import RandomSource
from tests.engine.conftest import make_data, make_module, make_plan


def half(data):
    return data[0].to(torch.bfloat16), data[1]


# Half precision ------------------------------------------------------------------------------------------


def test_a_mean_loss_of_a_module_in_half_precision_is_refused_with_the_remedy(private):
    with pytest.raises(
        PdpsgdError, match=r"Expected a summed loss in half precision.*loss_reduction=\"sum\""
    ):
        private(module=make_module().to(torch.bfloat16), data=half(make_data(40)))


def in_autocast(run, reduction):
    for inputs, targets in run.loader:
        run.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(run.module(inputs), targets, reduction=reduction)
        loss.backward()
        run.optimizer.step()


def test_a_mean_loss_in_autocast_is_refused_with_the_remedy(private, flat):
    run = private(engine=PrivacyEngine(watch_loop=False))
    before = flat(run.module)
    with pytest.raises(PdpsgdError, match=r"Expected a summed loss in half precision"):
        in_autocast(run, "mean")
    assert torch.equal(flat(run.module), before)


def test_a_summed_loss_in_half_precision_trains_without_a_word(private, flat):
    watched, unwatched = (
        private(loss_reduction="sum", engine=PrivacyEngine(watch_loop=watch)) for watch in (True, False)
    )
    in_autocast(watched, "sum")
    in_autocast(unwatched, "sum")
    assert watched.engine.steps_left == 0
    assert torch.equal(flat(watched.module), flat(unwatched.module))


def test_a_step_inside_autocast_gives_what_it_gives_outside(private, flat):
    inside, outside = private(), private()
    for run in (inside, outside):
        for inputs, targets in run.loader:
            run.optimizer.zero_grad()
            functional.cross_entropy(run.module(inputs), targets).backward()
            with torch.autocast("cpu", torch.bfloat16, enabled=run is inside):
                run.optimizer.step()
    assert torch.equal(flat(inside.module), flat(outside.module))


def test_a_frozen_part_in_half_precision_does_not_hinder_a_mean_loss(private):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Linear(5, 5).to(torch.bfloat16).requires_grad_(False)
            self.head = nn.Linear(5, 3)

        def forward(self, inputs):
            return self.head(self.encoder(inputs.to(torch.bfloat16)).float())

    run = private(module=Mixed())
    run.train()
    assert run.engine.steps_left == 0


def test_a_grad_scaler_is_refused(private):
    run = private()
    scaler = torch.amp.GradScaler("cpu")
    inputs, targets = next(iter(run.loader))
    scaler.scale(functional.cross_entropy(run.module(inputs), targets)).backward()
    with pytest.raises(PdpsgdError, match="Expected no GradScaler"):
        scaler.step(run.optimizer)
    run.engine.close()


def test_a_grad_scaler_that_is_switched_off_changes_nothing(private, flat):
    scaled, plain = private(), private()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for inputs, targets in scaled.loader:
        scaled.optimizer.zero_grad()
        scaler.scale(functional.cross_entropy(scaled.module(inputs), targets)).backward()
        scaler.step(scaled.optimizer)
        scaler.update()
    plain.train()
    assert torch.equal(flat(scaled.module), flat(plain.module))


# Compiled modules ----------------------------------------------------------------------------------------


def compiled_in_place(module):
    module.compile()
    return module


COMPILED = {
    "wrapped": torch.compile,
    "in place": compiled_in_place,
    "a part": lambda module: nn.Sequential(torch.compile(module[0]), *module[1:]),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, when it loads its compiler
@pytest.mark.parametrize("way", COMPILED)
def test_a_compiled_module_is_refused_with_the_remedy(private, way):
    with pytest.raises(
        PdpsgdError, match=r"not compiled.*torch\.compile.*compile what make_private gives back"
    ):
        private(module=COMPILED[way](make_module()))


# Datasets ------------------------------------------------------------------------------------------------


class Reversed(TensorDataset):
    def __getitem__(self, index):
        return super().__getitem__(len(self) - 1 - index)


@pytest.mark.parametrize("wrap", [lambda data: data, DataLoader], ids=["dataset", "loader"])
def test_a_subclass_of_tensor_dataset_is_read_as_it_reads_itself(private, wrap):
    inputs, targets = make_data(40)
    numbers = np.full(40, -1)
    numbers[7] = 0  # person 7 has item 0, which is the last row of the tensors
    plan = make_plan(rates=(1.0,), steps=1)
    run = private(plan=plan, data=wrap(Reversed(inputs[:1], targets[:1])), record_of_person=numbers)
    next(iter(run.loader))
    dataset = Reversed(inputs, targets)
    run = private(plan=plan, data=wrap(dataset))
    (found, _), people = next(iter(run.loader)), run.engine.execution.current.records
    assert torch.equal(found, inputs.flip(0)[people.clip(min=0)])


def test_a_plain_tensor_dataset_is_read_as_tensors(private):
    data = make_data(40)
    one, other = private(data=TensorDataset(*data)), private(data=data)
    for first, second in zip(one.loader, other.loader, strict=True):
        assert torch.equal(first[0], second[0])
        one.step(*first)
        other.step(*second)


class Texts(Dataset):
    """Items that are no tensors."""

    def __init__(self, texts):
        self.texts = texts

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return {"text": self.texts[index], "number": index}


def test_one_changed_item_among_many_changes_the_digest():
    texts = [f"text {index}" for index in range(500)]
    digests = {fingerprint_data(Texts(texts))}
    for place in (1, 123, 498):
        digests.add(fingerprint_data(Texts([*texts[:place], "changed", *texts[place + 1 :]])))
    assert len(digests) == 4
    assert fingerprint_data(Texts(list(texts))) in digests


class Vectors(Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data[0])

    def __getitem__(self, index):
        return self.data[0][index], int(self.data[1][index])


def test_a_run_is_not_resumed_where_one_of_many_records_was_changed(private, tmp_path):
    plan = make_plan(people=300, rates=(0.1,))
    private(plan=plan, data=Vectors(make_data(300))).engine.save(tmp_path / "checkpoint")
    same = private(plan=plan, data=Vectors(make_data(300)))
    same.engine.resume(tmp_path / "checkpoint")
    inputs, targets = make_data(300)
    inputs[123] += 1
    changed = private(plan=plan, data=Vectors((inputs, targets)))
    with pytest.raises(PdpsgdError, match="Expected the data that the checkpoint"):
        changed.engine.resume(tmp_path / "checkpoint")


# Keys ----------------------------------------------------------------------------------------------------


def keys_in(folder):
    return {path.name: load(path).key for path in folder.glob("*") if "journal" not in path.name}


def test_after_the_last_step_no_checkpoint_of_a_closed_run_has_its_key(private, tmp_path):
    run = private()
    for step, batch in enumerate(run.loader):
        run.step(*batch)
        if step in (1, 3):
            run.engine.save(tmp_path / f"step {step}")
    assert None not in keys_in(tmp_path).values()  # until the last model is saved, the run may be taken up
    run.engine.close()
    assert keys_in(tmp_path) == {"step 1": None, "step 3": None}
    assert not list(tmp_path.glob("*journal"))


def test_saving_the_last_step_erases_the_key_everywhere(private, tmp_path):
    """Whatever happens before the run is closed."""
    run = private()
    for step, batch in enumerate(run.loader):
        run.step(*batch)
        if step in (1, 3):
            run.engine.save(tmp_path / f"step {step}")
    run.engine.save(tmp_path / "last")
    assert keys_in(tmp_path) == {"step 1": None, "step 3": None, "last": None}
    assert not list(tmp_path.glob("*journal"))
    run.engine.save(tmp_path / "last")  # once more does no harm
    run.engine.close()


def test_a_checkpoint_of_the_last_step_brings_the_model_back(private, tmp_path, flat):
    run = private(seed=None)
    run.train()
    run.engine.save(tmp_path / "last")
    again = private(seed=None)
    again.engine.resume(tmp_path / "last")
    assert torch.equal(flat(again.module), flat(run.module))
    assert again.engine.steps_left == 0
    assert list(again.loader) == []
    assert again.engine.verdict().is_for_release
    assert again.engine.spent() == run.engine.spent()
    again.engine.save(tmp_path / "copy")
    again.engine.close()


def test_a_run_that_was_closed_before_its_last_step_is_not_taken_up(private, tmp_path):
    run = private()
    run.engine.save(tmp_path / "checkpoint")
    run.engine.close()
    with pytest.raises(PdpsgdError, match="closed after 0 steps"):
        private().engine.resume(tmp_path / "checkpoint")


def test_a_resumed_run_erases_the_key_of_checkpoints_from_before_the_interruption(private, tmp_path):
    run = private()
    run.engine.save(tmp_path / "first")
    run.engine.save(tmp_path / "second")
    run = private()
    run.engine.resume(tmp_path / "second")
    run.train()
    run.engine.save(tmp_path / "last")
    assert keys_in(tmp_path) == {"first": None, "second": None, "last": None}


def test_a_run_that_is_killed_while_it_erases_keys_erases_them_when_it_is_resumed(
    private, tmp_path, monkeypatch
):
    run = private()
    run.engine.save(tmp_path / "first")
    run.train()
    with monkeypatch.context() as patch:
        patch.setattr("pdpsgd.engine.resuming.erase_key", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.engine.save(tmp_path / "last")
    assert keys_in(tmp_path)["first"] is not None
    private().engine.resume(tmp_path / "last")
    assert keys_in(tmp_path) == {"first": None, "last": None}
    assert not list(tmp_path.glob("*journal"))


def test_a_checkpoint_that_cannot_be_read_keeps_no_other_from_losing_its_key(private, tmp_path):
    run = private()
    for name in ("first", "second", "third"):
        run.engine.save(tmp_path / name)
    (tmp_path / "first").write_bytes(b"damaged")
    run.train()
    with pytest.raises(PdpsgdError, match="first"):
        run.engine.save(tmp_path / "last")
    (tmp_path / "first").unlink()
    assert keys_in(tmp_path) == {"second": None, "third": None, "last": None}


@pytest.mark.parametrize("name", [".", "../.."])
def test_a_folder_is_no_checkpoint_of_the_run(private, tmp_path, name):
    run = private()
    run.engine.save(tmp_path / "checkpoint")
    saved = load(tmp_path / "checkpoint")
    save(tmp_path / "checkpoint", saved.tensors, {**saved.state, "checkpoints": [name]}, saved.key)
    with pytest.raises(PdpsgdError, match="name of a file"):
        private().engine.resume(tmp_path / "checkpoint")


def test_another_runs_key_under_the_same_name_stays(private, tmp_path):
    old, new = private(seed=1), private(seed=2)
    old.engine.save(tmp_path / "checkpoint")
    new.engine.save(tmp_path / "checkpoint")
    old.engine.close()
    assert load(tmp_path / "checkpoint").key == new.engine.source.key_bytes()


def test_a_resumed_run_erases_the_key_of_the_checkpoint_it_came_from(private, tmp_path):
    private().engine.save(tmp_path / "checkpoint")
    run = private()
    run.engine.resume(tmp_path / "checkpoint")
    run.train()
    run.engine.close()
    assert load(tmp_path / "checkpoint").key is None


# Verdict -------------------------------------------------------------------------------------------------


def test_a_run_with_a_secret_key_that_was_seen_through_is_for_release(private):
    run = private(seed=None)
    run.train()
    assert run.engine.verdict().is_for_release


def test_a_seed_or_a_weak_generator_is_not_for_release(private):
    assert [reason.code for reason in private().engine.verdict().reasons] == ["seeded"]
    weak = private(seed=None, secure=False).engine.verdict()
    assert [reason.code for reason in weak.reasons] == ["weak-generator"]


def test_a_key_that_somebody_knows_is_not_for_release_also_after_resuming(private, tmp_path):
    run = private(seed=None, source=RandomSource.from_key(bytes(range(32))))
    assert [reason.code for reason in run.engine.verdict().reasons] == ["seeded"]
    run.engine.save(tmp_path / "checkpoint")
    resumed = private(seed=None)
    resumed.engine.resume(tmp_path / "checkpoint")
    assert [reason.code for reason in resumed.engine.verdict().reasons] == ["seeded"]


def test_the_operating_systems_key_is_for_release_given_or_resumed(private, tmp_path):
    run = private(seed=None, source=RandomSource.from_operating_system())
    assert run.engine.verdict().is_for_release
    run.engine.save(tmp_path / "checkpoint")
    resumed = private(seed=None)
    resumed.engine.resume(tmp_path / "checkpoint")
    assert resumed.engine.verdict().is_for_release


def test_a_source_of_another_class_is_not_for_release_also_after_resuming(private, tmp_path):
    class Quieter(RandomSource):
        pass

    run = private(seed=None, source=Quieter.from_operating_system())
    assert [reason.code for reason in run.engine.verdict().reasons] == ["test-double"]
    run.engine.save(tmp_path / "checkpoint")
    resumed = private(seed=None)
    resumed.engine.resume(tmp_path / "checkpoint")
    assert [reason.code for reason in resumed.engine.verdict().reasons] == ["test-double"]


def test_a_source_serves_one_run(private):
    source = RandomSource.from_operating_system()
    private(seed=None, source=source)
    with pytest.raises(PdpsgdError, match="a new random source for every run"):
        private(seed=None, source=source)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(PdpsgdError, match="request for a copy"):
            copied(RandomSource.from_operating_system())


def test_a_loss_that_could_not_be_seen_through_is_not_for_release(private, tmp_path):
    run = private(seed=None)
    inputs, targets = next(iter(run.loader))
    functional.cross_entropy(run.module(inputs), targets).backward(torch.ones(()))
    with pytest.warns(UserWarning, match="could not be checked"):
        run.optimizer.step()
    assert "unseen-code" in [reason.code for reason in run.engine.verdict().reasons]
    run.engine.save(tmp_path / "checkpoint")
    resumed = private(seed=None)
    resumed.engine.resume(tmp_path / "checkpoint")
    assert "unseen-code" in [reason.code for reason in resumed.engine.verdict().reasons]


# Errors inside a step ------------------------------------------------------------------------------------


@pytest.mark.parametrize("add", ["add_weighted_sums", "add_clipped"])  # step by step, and at once
def test_a_batch_that_failed_halfway_is_not_added_twice(private, monkeypatch, flat, add):
    """A step that runs out of memory is often tried again: the layers that came first had the batch twice."""
    if add == "add_weighted_sums":
        monkeypatch.setattr(Layers, "add_clipped", lambda *_: False)
    elif native.library() is None:
        pytest.skip("no compiled code")
    whole = private()
    whole.train()
    run, honest, calls = private(), getattr(Layers, add), []

    def out_of_memory(self, *weights):
        calls.append(1)
        added = honest(self, *weights)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return added

    monkeypatch.setattr(Layers, add, out_of_memory)

    def train():
        for inputs, targets in run.loader:
            with contextlib.suppress(torch.OutOfMemoryError):
                run.step(inputs, targets)
                continue
            run.step(inputs, targets)

    with pytest.raises(PdpsgdError, match=r"the batch would count twice\. Begin a new pass"):
        train()
    assert run.engine.steps_taken == 2
    train()
    assert torch.equal(flat(run.module), flat(whole.module))


@pytest.mark.parametrize("is_forgotten", [True, False])
def test_a_batch_that_was_added_when_an_interruption_came_is_not_added_again(
    private, monkeypatch, flat, is_forgotten
):
    """Ctrl-C between adding the batch and noting that it was added; before or after its backward pass is forgotten."""
    whole = private()
    whole.train()
    run, honest = private(), ClippedGradients.forget

    def interrupted(gradients):
        if is_forgotten or not gradients.additions:
            honest(gradients)
        if gradients.additions:
            raise KeyboardInterrupt

    for batch in run.loader:
        with monkeypatch.context() as patch:
            patch.setattr(ClippedGradients, "forget", interrupted)
            with pytest.raises(KeyboardInterrupt):
                run.step(*batch)
        with pytest.raises(PdpsgdError, match=r"the batch would count twice\. Begin a new pass"):
            run.step(*batch) if is_forgotten else run.optimizer.step()
        break
    run.train()
    assert torch.equal(flat(run.module), flat(whole.module))


@pytest.mark.parametrize("change", ["kernel_size", "stride", "weight"])
def test_a_layer_that_is_changed_before_its_step_is_refused_by_name(private, change):
    plan = make_plan(people=40)
    inputs, targets = torch.randn(40, 2, 8, 8), torch.arange(40) % 3
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    run = private(module=module, data=(inputs, targets), plan=plan)
    batches = iter(run.loader)
    run.step(*next(batches))
    images, labels = next(batches)
    functional.cross_entropy(module(images), labels).backward()
    if change == "weight":
        module[0].weight.data = torch.zeros(3, 2, 5, 5)
    else:
        setattr(module[0], change, (2, 2))
    with pytest.raises(PdpsgdError, match=r"parameters as they|in the shapes they|stride.* were changed"):
        run.optimizer.step()


def test_a_stride_that_is_changed_between_steps_is_the_model_s_own_business(private):
    inputs, targets = torch.randn(40, 2, 8, 8), torch.arange(40) % 3
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    run = private(module=module, data=(inputs, targets), plan=make_plan(people=40))
    for step, batch in enumerate(run.loader):
        module[0].stride = (2, 2) if step > 2 else (1, 1)
        run.step(*batch)
    assert run.engine.steps_left == 0
