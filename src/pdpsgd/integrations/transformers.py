"""The Trainer of transformers, trained by a plan: `PrivateTrainer`.

    trainer = PrivateTrainer(model, arguments, train_dataset=texts, processing_class=tokenizer,
                             budgets=budgets, person_column="author")
    trainer.train()
    trainer.save_model("model")           # loads with from_pretrained, without pdpsgd

Models, arguments, collators, callbacks, evaluation and what is saved are those of transformers. The training loop is
this file's own, around `PrivacyEngine`: nothing else touches a gradient.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pdpsgd.budgets.budgets import Budgets
from pdpsgd.engine.checks.held_out import check_held_out
from pdpsgd.engine.checks.probe import left_as_it_was
from pdpsgd.engine.privacy_engine import PrivacyEngine
from pdpsgd.errors import PdpsgdError, fail, shown
from pdpsgd.gradients.clipping import ClippedGradients
from pdpsgd.gradients.unsupported import train_mode
from pdpsgd.integrations._torch import move_scheduler
from pdpsgd.integrations.padding import MULTIPLE, OneByOne, padded_to, public_length
from pdpsgd.planning.planner import plan as make_plan

try:
    import transformers
    from transformers.trainer_utils import TrainOutput

    from pdpsgd.integrations._transformers import (
        begin_state,
        evaluated,
        rotate,
        unwrapped,
        uploading_without,
        without_unused_columns,
    )
    from pdpsgd.integrations.token_losses import (
        CAUSAL,
        IGNORED,
        SEQUENCE,
        mean_over_own_tokens,
        token_loss_of,
    )
except ImportError as error:  # pragma: no cover
    raise PdpsgdError(
        "Expected the packages transformers and accelerate. Install them: pip install 'pdpsgd[transformers]'"
    ) from error

if TYPE_CHECKING:
    from pdpsgd.ledger import Ledger, ReservedRun
    from pdpsgd.planning.plans import Plan
    from pdpsgd.planning.verdict import Verdict
    from pdpsgd.training.run_folder import RunFolder

__all__ = ["PrivateTrainer"]

SENSITIVE_LOSS = "sensitive_training_loss"
DECODED = {"decoder_input_ids", "decoder_inputs_embeds"}


@dataclass(frozen=True, kw_only=True)
class PrivacyOptions:
    """What a private run is given beside the arguments of a Trainer."""

    budgets: Budgets | None = None
    plan: Plan | None = None
    ledger: Ledger | str | os.PathLike[str] | None = None
    spend: str | float = "0.25"
    person_column: str | None = None
    records_per_person: int | None = None
    max_length: int | None = None
    plan_options: Mapping[str, Any] = field(default_factory=dict)
    log_training_loss: bool = False
    noise_seed: int | None = None


class PrivateTrainer(transformers.Trainer):
    """A `transformers.Trainer` that gives every person the privacy they asked for.

    The arguments mean what they mean there, with people instead of rows: `per_device_train_batch_size` times
    `gradient_accumulation_steps` (times the number of processes) is the expected number of people in a step, and the
    first of them is what goes through the model together; `max_steps`, or `num_train_epochs` times the number of
    people, is the number of steps; `max_grad_norm` is the clipping norm of each person's gradient.

    Guarantee: that of `PrivacyEngine`, for the parameters at any step, and for everything in `output_dir` but its
    folders people/ and private/, where the training loss was not asked for. Evaluation is on other people, to whom
    nothing is promised. Every record is padded by itself to a public length, so that no row depends on another.

    Args:
        arguments: All arguments of `transformers.Trainer`, by position or name.
        budgets: What each person allows; with `ledger`, over all runs together.
        plan: A ready plan, instead of one computed from budgets and training arguments.
        ledger: The ledger of these people, or its place: the run is charged there before a record is read.
        spend: What the run takes of what people have left in the ledger.
        person_column: The column of `train_dataset` with the id of each record's person. By default record i is person
            i's of the list.
        records_per_person: K, where people have many records: K of them take part at most in a step.
        max_length: The public length that texts are padded to; by default the greatest that tokenizer and model allow.
            Shorter is faster. Choose it without looking at the texts.
        plan_options: Further arguments of `pdpsgd.plan`, such as `mechanism`.
        log_training_loss: Whether to log the mean loss of the people in each step, as "sensitive_training_loss". No
            promise covers it: it is not for publishing, nor is what is written beside it.
        noise_seed: Makes sampling and noise repeatable, and the run not for release.

    Raises:
        PdpsgdError: An argument would break the promise, or people, records and plan do not fit together.
    """

    args: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    train_dataset: Any
    eval_dataset: Any

    def __init__(
        self,
        *arguments: Any,
        budgets: Budgets | None = None,
        plan: Plan | None = None,
        ledger: Ledger | str | os.PathLike[str] | None = None,
        spend: str | float = "0.25",
        person_column: str | None = None,
        records_per_person: int | None = None,
        max_length: int | None = None,
        plan_options: Mapping[str, Any] | None = None,
        log_training_loss: bool = False,
        noise_seed: int | None = None,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        check_arguments(self.args)
        if budgets is None and plan is None and ledger is None:
            fail("Expected budgets (what each person allows), a plan, or a ledger. Got none of them.")
        self.private = PrivacyOptions(
            budgets=budgets if budgets is None or isinstance(budgets, Budgets) else Budgets(budgets),
            plan=plan,
            ledger=ledger,
            spend=spend,
            person_column=person_column,
            records_per_person=records_per_person,
            max_length=max_length,
            plan_options=dict(plan_options or {}),
            log_training_loss=log_training_loss,
            noise_seed=noise_seed,
        )
        self.engine = PrivacyEngine()
        self._begun = False
        self._planned: Plan | None = None
        self._held_out: list[Any] = []  # what was found to be of other people
        self._losses: list[tuple[int, Tensor]] = []  # of the pieces of the steps since the last log

    # --- what the caller asks for -----------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Take the plan's steps.

        Args:
            resume_from_checkpoint: True, or `output_dir`, to go on with the run that was saved there.
            trial: Must be None: every trial would be a run of its own.
            ignore_keys_for_eval: As in `Trainer.train`.

        Returns:
            The number of steps taken. The training loss in it is NaN, as no promise covers it, and no time is told:
            it depends on how many records people hold.

        Raises:
            PdpsgdError: The run cannot keep its promise, or cannot be resumed.
        """
        if trial is not None or self.model_init is not None:
            fail(
                "Expected a model, and no trial. Got model_init or a search for settings: each of its trials would "
                "spend people's budgets. Choose settings without the private data, or plan each trial (history=[...])."
            )
        if self._begun:
            fail(
                "Expected one train() for each PrivateTrainer. Got a second one: the plan's steps would be taken "
                "again. Train on with a new one, by a plan that counts this one as history (plan(..., history=[...]))."
            )
        self._check_others(self.eval_dataset, by_values=False)
        self._try_model()
        resume = self._is_resumed(resume_from_checkpoint)
        self._begun = self.is_in_train = True
        with self._reserved() as reservation:
            self._make_private(reservation)
            self._check_others(self.eval_dataset, by_values=True)
            self._begin(resume)
            self._run(ignore_keys_for_eval)
        self.is_in_train = False
        if not self.engine.steps_left:
            self.engine.close()
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        return TrainOutput(self.state.global_step, math.nan, {"steps": float(self.state.global_step)})

    def verdict(self) -> Verdict:
        """Say whether the promise holds for all, holds with exceptions, or the model is not for release."""
        return self.engine.verdict()

    def hyperparameter_search(self, *arguments: Any, **named: Any) -> Any:
        """Refuse: every trial is a run on people's records."""
        fail(
            "Expected settings that were chosen without the private data. Got hyperparameter_search: each of its "
            "trials would spend people's budgets. See docs/choosing.md."
        )

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Evaluate on other people, as `Trainer.evaluate` does: what is found is logged, and saved with the model.

        Args:
            eval_dataset: Records of other people; by default the Trainer's own.
            ignore_keys: As there.
            metric_key_prefix: As there.

        Raises:
            PdpsgdError: People who are trained on are among them: nothing would protect what is logged of them.
        """
        given = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(given, str):
            given = self.eval_dataset[given]
        self._check_others(given, by_values=True)
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def push_to_hub(self, *arguments: Any, **named: Any) -> Any:
        """Upload `output_dir` to the hub as `Trainer.push_to_hub` does, but for people/ and private/."""
        from pdpsgd.training.run_folder import PEOPLE, PRIVATE

        with uploading_without(PEOPLE, PRIVATE):
            return super().push_to_hub(*arguments, **named)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Compute the mean loss over examples; where labels are of tokens, an example's is the mean over its own.

        Args:
            model: The model.
            inputs: What it is called with, and the labels.
            return_outputs: Whether to return the outputs, too.
            num_items_in_batch: Not used: dividing by a number of tokens that others have mixes examples.

        Returns:
            The loss, or a pair of it and the outputs.
        """
        kind = token_loss_of(self.model)
        is_own = self.label_smoother is None and self.compute_loss_func is None and kind is not None
        if not is_own or "labels" not in inputs:
            return super().compute_loss(model, inputs, return_outputs)
        given = {name: value for name, value in inputs.items() if name != "labels"}
        if kind == SEQUENCE and not DECODED & given.keys():
            # As the model would do itself, if it were given the labels.
            make = unwrapped(self.model).prepare_decoder_input_ids_from_labels
            given["decoder_input_ids"] = make(labels=inputs["labels"])
        if kind == SEQUENCE:
            given["use_cache"] = False  # it is for generating, and keeps tensors from layer to layer
        outputs = model(**given)
        loss = mean_over_own_tokens(outputs["logits"], inputs["labels"], shifted=kind == CAUSAL)
        return (loss, outputs) if return_outputs else loss

    # --- the run ----------------------------------------------------------------------------------------

    def _make_private(self, reservation: ReservedRun | None) -> None:
        """Make optimizer and records private; what they are is the Trainer's own doing."""
        wanted = self.private
        self._planned = made = self._plan() if reservation is None else reservation.plan
        self._check_steps(made)
        self.create_optimizer_and_scheduler(num_training_steps=made.steps)
        train_mode(self.model)
        _, self.optimizer, self._private_loader = self.engine.make_private(
            module=self.model,
            optimizer=self.optimizer,
            data_loader=DataLoader(
                self.private_records(),
                num_workers=self.args.dataloader_num_workers,
                multiprocessing_context=self.args.dataloader_multiprocessing_context,
            ),
            plan=made,
            budgets=wanted.budgets if reservation is None else None,
            record_ids=self._record_ids(),
            records_per_person=wanted.records_per_person,
            max_physical_batch_size=self._most_at_once(),
            seed=wanted.noise_seed,
            reservation=reservation,
        )
        move_scheduler(self.lr_scheduler, self.optimizer)

    def private_records(self) -> OneByOne:
        """Return the training records as the private run reads them: each padded by itself to a public length."""
        if self.train_dataset is None:
            fail("Expected a train_dataset. Got None.")
        collate, length = self.data_collator, self.private.max_length
        if hasattr(collate, MULTIPLE):
            tokenizer = getattr(collate, "tokenizer", None) or self.processing_class
            length = length or public_length(tokenizer, getattr(self.model, "config", None))
            collate = padded_to(collate, length)
        column = self.private.person_column
        return OneByOne(
            self.train_dataset,
            without_unused_columns(self, collate),
            without=frozenset() if column is None else frozenset({column}),
        )

    def _try_model(self) -> None:
        """Refuse a model with layers that cannot be trained, on made-up tokens: before anything is read or spent."""
        own = unwrapped(self.model)
        if not isinstance(own, transformers.PreTrainedModel) or own.main_input_name != "input_ids":
            return
        made_up = torch.full((4, 6), IGNORED, device=self.args.device)
        inputs = {"input_ids": made_up.clamp(min=1), "attention_mask": made_up.clamp(min=1)}
        if own.config.is_encoder_decoder and token_loss_of(own) == SEQUENCE:
            inputs["decoder_input_ids"] = inputs["input_ids"]
        gradients = ClippedGradients(self.model)
        try:
            with left_as_it_was(self.model):
                outputs = self.model(**inputs)
                found = outputs["logits"] if "logits" in outputs else outputs[0]
                gradients.record(found.float().square().sum())
                gradients.per_example_norms(loss_reduction="sum")
        except PdpsgdError as error:
            fail(
                f"{error} This was found with made-up tokens, before anything was read or spent. What is about "
                "positions alone may be frozen: model.get_submodule(NAME).requires_grad_(False)."
            )
        except Exception:  # it wants other inputs: the first batch says it better
            return
        finally:
            gradients.forget()
            gradients.remove()

    def _check_others(self, given: Any, *, by_values: bool) -> None:
        """Refuse people to evaluate on who are on the list, or whose records are trained on."""
        for others in given.values() if isinstance(given, Mapping) else [given]:
            if others is None or (by_values and any(others is known for known in self._held_out)):
                continue
            self._check_persons(others)
            check_held_out(self.train_dataset, others, purpose="in eval_dataset", by_values=by_values)
            if by_values:
                self._held_out.append(others)

    def _check_persons(self, others: Any) -> None:
        """Refuse records to evaluate on that say they are of people on the list."""
        column, known = self.private.person_column, self._listed_people()
        if column is None or known is None:
            return
        both = sorted({str(person) for person in _persons_of(others, column) if person is not None} & known)
        if both:
            fail(
                f"Expected other people in eval_dataset, who are not trained on. Got {len(both):,} on the list, "
                f"such as {shown(both[0])} (column {column!r}): what is published about them would have no noise. "
                "Leave them out of either, with all their records."
            )

    def _listed_people(self) -> set[str] | None:
        """Return the ids of the people on the list; None if they are not known by ids, or not yet."""
        budgets, plan = self.private.budgets, self._planned or self.private.plan
        if budgets is not None:
            return set(map(str, budgets.ids.tolist())) if budgets.named else None
        if plan is None or plan.roster is None or not plan.roster.named:
            return None
        return set(map(str, plan.roster.ids.tolist()))

    def _record_ids(self) -> Any:
        column, records = self.private.person_column, self.train_dataset
        if column is None:
            return None
        found = _persons_of(records, column)
        if any(person is None for person in found):
            fail(
                f"Expected the person of every record in column {column!r}. Got a record without: number "
                f"{found.index(None)}."
            )
        return np.asarray(found)

    def _batch_size(self) -> int:
        """Return the expected number of people in a step, over all processes."""
        return self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size

    def _most_at_once(self) -> int:
        least = self.private.records_per_person or 1
        return max(int(self.args.train_batch_size), least)

    def _asked_of_plan(self, people: int) -> dict[str, Any]:
        """Return what the training arguments say about the plan."""
        batch = min(self._batch_size(), people)
        steps = self.args.max_steps
        if steps <= 0:
            steps = max(1, math.ceil(self.args.num_train_epochs * people / batch))
        asked = {"steps": steps, "batch_size": batch, "max_grad_norm": self.args.max_grad_norm}
        return {**asked, **self.private.plan_options}

    def _plan(self) -> Plan:
        wanted = self.private
        if wanted.plan is not None:
            return wanted.plan
        assert wanted.budgets is not None
        return make_plan(wanted.budgets, **self._asked_of_plan(len(wanted.budgets)))

    def _check_steps(self, plan: Plan) -> None:
        if self.args.max_steps > 0 and self.args.max_steps != plan.steps:
            fail(
                f"Expected max_steps to be that of the plan, {plan.steps}, or left out. Got {self.args.max_steps}."
            )
        if any(r.fresh_model for r in plan.rounds[1:]):
            fail(
                f"Expected a plan that trains one model. Got one of {plan.mechanism!r}, which begins several: use "
                "pdpsgd.fit."
            )

    def _begin(self, resume: bool) -> None:
        """Begin the state that callbacks see, and the run's files; or go on from them."""
        plan = self.engine.plan
        expected = plan.rounds[0].expected_batch_size
        self._steps_per_epoch = max(1, round(plan.people / max(1.0, expected)))
        begin_state(self, steps=plan.steps, steps_per_epoch=self._steps_per_epoch)
        folder = self._folder()
        if resume:
            self.engine.resume(folder.checkpoint, scheduler=self.lr_scheduler, trainer=_Logged(self))
            self.state.global_step = self.engine.steps_taken
        elif self.args.save_strategy != "no":
            if self.engine.ranks.first:
                folder.make().write_plan(plan)
                if self.private.budgets is not None and self.private.ledger is None:
                    folder.write_promises(plan, self.private.budgets)
            self.engine.keep_journal(folder.journal)
            self._save_private()  # the key is safe before the first noise is given out

    def _run(self, ignore_keys: Any) -> None:
        """Take the plan's remaining steps; callbacks are told of each."""
        callbacks = self.callback_handler
        self.control = callbacks.on_train_begin(self.args, self.state, self.control)
        new_step = True
        for batch in self._private_loader:
            if new_step:
                if self.state.global_step % self._steps_per_epoch == 0:
                    self.control = callbacks.on_epoch_begin(self.args, self.state, self.control)
                self.control = callbacks.on_step_begin(self.args, self.state, self.control)
            self._backward(batch)
            self.optimizer.step()
            new_step = self.optimizer.took_step
            if new_step:
                self._after_step(ignore_keys)
                if self.control.should_training_stop and self.engine.steps_left:
                    break  # a callback stops early: what is promised covers the whole plan

    def _backward(self, batch: dict[str, Tensor]) -> None:
        train_mode(self.model)
        size = len(next(iter(batch.values())))
        self.optimizer.zero_grad()
        if size == 0:
            return  # nobody was sampled: the step is noise alone
        loss = self.compute_loss(self.model, self._prepare_inputs(batch))
        self.engine.backward(loss)
        if self.private.log_training_loss:
            self._losses.append((size, loss.detach()))

    def _after_step(self, ignore_keys: Any) -> None:
        callbacks = self.callback_handler
        rate = self._get_learning_rate()
        self.lr_scheduler.step()
        self.state.global_step += 1
        self.state.epoch = self.state.global_step / self._steps_per_epoch
        self.control = callbacks.on_step_end(self.args, self.state, self.control)
        if self.state.global_step % self._steps_per_epoch == 0 or not self.engine.steps_left:
            self.control = callbacks.on_epoch_end(self.args, self.state, self.control)
        if self.control.should_log:
            self.log({"learning_rate": rate, **self._sensitive_loss()})
        if self.control.should_evaluate:
            evaluated(self, ignore_keys)
        if self.control.should_save:
            self._save_everything()
        elif not self.engine.steps_left and self.args.save_strategy != "no":
            self._save_private()  # the key is left out of it from now on

    def _sensitive_loss(self) -> dict[str, float]:
        people = sum(size for size, _ in self._losses)
        if not people:
            return {}
        mean = sum(size * float(loss) for size, loss in self._losses) / people
        self._losses.clear()
        return {SENSITIVE_LOSS: mean}

    # --- files ------------------------------------------------------------------------------------------

    def _save_everything(self) -> None:
        """Save the model for whoever wants to use it as it is now, and the run for going on."""
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        self.save_model(str(folder), _internal_call=True)
        if self.args.should_save:
            self.state.save_to_json(str(folder / "trainer_state.json"))
            rotate(self)
        self._save_private()
        self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def _save_private(self) -> None:
        self.engine.save(self._folder().checkpoint, scheduler=self.lr_scheduler, trainer=_Logged(self))

    def _folder(self) -> RunFolder:
        from pdpsgd.training.run_folder import RunFolder

        return RunFolder(self.args.output_dir)

    def _is_resumed(self, asked: str | bool | None) -> bool:
        """Tell whether the run in `output_dir` is to go on, and refuse what cannot."""
        folder = self._folder()
        if not asked:
            if folder.begun:
                fail(
                    "Expected an output_dir without a run in it, or train(resume_from_checkpoint=True) to go on with "
                    f"that one. Got {self.args.output_dir!r}: a new run would spend people's budgets again."
                )
            return False
        if asked is not True and Path(asked).resolve() != Path(self.args.output_dir).resolve():
            fail(
                f"Expected resume_from_checkpoint=True, to go on where the run in output_dir ended. Got {asked!r}: a "
                "run goes on from its last step alone, as people's budgets are spent up to there. (Models in "
                "checkpoint-N are for use: from_pretrained.)"
            )
        if not folder.begun:
            fail(
                f"Expected a run in output_dir to go on with. Got {self.args.output_dir!r}, where none was saved."
            )
        return True

    @contextmanager
    def _reserved(self) -> Iterator[ReservedRun | None]:
        """Reserve the run in its ledger, if there is one, and finish it there at the end."""
        if self.private.ledger is None:
            yield None
            return
        from pdpsgd.ledger import Ledger
        from pdpsgd.training.booking import book, under
        from pdpsgd.training.options import TrainingOptions

        kept = self.private.ledger
        ledger = kept if isinstance(kept, Ledger) else Ledger(kept)
        folder = self._folder() if self.args.save_strategy != "no" else None
        budgets, plan = self.private.budgets, self.private.plan
        people = plan.people if plan is not None else len(budgets) if budgets is not None else 0
        if not people:
            fail("Expected budgets, or a plan, with a ledger. Got neither.")
        asked = {} if plan is not None else self._asked_of_plan(people)
        known = {name: asked.pop(name) for name in list(asked) if name in TrainingOptions.declared()}
        options = TrainingOptions(**known, plan_options=asked, spend=self.private.spend)
        reservation = book(
            ledger, budgets=budgets, options=options, plan=plan, folder=folder, device=self.args.device
        )
        with under(reservation, folder):
            yield reservation


def _persons_of(records: Any, column: str) -> list[Any]:
    """Return the person of each record; None where a record says none."""
    known = getattr(records, "column_names", None)
    if known is not None and column in known:
        return list(records[column])
    try:
        count = len(records)
    except TypeError:  # a stream
        return []
    found = (None if known is not None else records[number] for number in range(count))
    return [each.get(column) if isinstance(each, Mapping) else None for each in found]


class _Logged:
    """What a checkpoint holds of the Trainer beside engine and scheduler: what was logged."""

    def __init__(self, trainer: PrivateTrainer) -> None:
        self.trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        return {"log_history": [dict(entry) for entry in self.trainer.state.log_history]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.trainer.state.log_history = list(state["log_history"])


REFUSED: dict[str, tuple[Any, str]] = {
    "fp16": (False, "gradients are scaled and rounded behind the mechanism's back"),
    "bf16": (False, "gradients are rounded behind the mechanism's back"),
    "auto_find_batch_size": (False, "the batch size would follow from the records"),
    "neftune_noise_alpha": (None, "it changes embeddings by a hook"),
    "torch_compile": (False, "compiled layers hide their inputs"),
    "use_liger_kernel": (False, "its layers have no per-example gradients"),
    "load_best_model_at_end": (False, "load the checkpoint that you choose with from_pretrained"),
    "deepspeed": (None, "gradients are reduced behind the mechanism's back"),
}


def check_arguments(args: Any) -> None:
    """Refuse training arguments that would change gradients behind the mechanism's back, or cannot be honored."""
    for name, (expected, reason) in REFUSED.items():
        given = getattr(args, name, expected)
        if given != expected:
            fail(f"Expected {name}={expected!r}: {reason}. Got {given!r}.")
    if getattr(args, "fsdp", None):
        fail(f"Expected no fsdp: clipping needs whole gradients on each rank. Got {args.fsdp!r}.")
    if args.n_gpu > 1:
        fail(f"Expected one device per process (torchrun). Got {args.n_gpu} in one process.")
    if not args.max_grad_norm > 0:
        fail(f"Expected max_grad_norm > 0: it is the clipping norm. Got {args.max_grad_norm!r}.")
    if str(getattr(args, "include_num_input_tokens_seen", "no")) not in ("no", "False"):
        fail("Expected include_num_input_tokens_seen='no': how many tokens people have is not protected.")
