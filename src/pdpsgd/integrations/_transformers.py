"""What the Trainer of transformers keeps to itself and the integration needs, in one place; checked with 5.23."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pdpsgd.errors import fail

CHECKED_WITH = "5.23"


def without_unused_columns(trainer: Any, collate: Callable[..., Any]) -> Callable[..., Any]:
    """Return the collation as the Trainer uses it: columns that the model does not take are left out first."""
    found: Callable[..., Any] = trainer._get_collator_with_removed_columns(collate, description="training")
    return found


def begin_state(trainer: Any, *, steps: int, steps_per_epoch: int) -> None:
    """Begin the state that callbacks read: how many steps there are, and when to log, evaluate and save."""
    from transformers.trainer_callback import ExportableState, TrainerState

    handler = trainer.callback_handler
    exported: Sequence[Any] = [each for each in handler.callbacks if isinstance(each, ExportableState)]
    trainer.state = TrainerState(
        stateful_callbacks=[*exported, trainer.control],
        is_local_process_zero=trainer.is_local_process_zero(),
        is_world_process_zero=trainer.is_world_process_zero(),
    )
    trainer.state.max_steps = steps
    trainer.state.num_train_epochs = -(-steps // steps_per_epoch)
    trainer.state.train_batch_size = trainer.args.train_batch_size
    trainer.state.compute_steps(trainer.args, steps)
    handler.model, handler.optimizer, handler.lr_scheduler = (
        trainer.model,
        trainer.optimizer,
        trainer.lr_scheduler,
    )


def evaluated(trainer: Any, ignore_keys: Any) -> Any:
    """Evaluate as the Trainer does in the middle of training."""
    return trainer._evaluate(None, ignore_keys)


def rotate(trainer: Any) -> None:
    """Delete the older of the checkpoint folders, where `save_total_limit` asks for it."""
    from transformers.trainer_utils import rotate_checkpoints

    rotate_checkpoints(
        output_dir=trainer.args.output_dir, save_total_limit=trainer.args.save_total_limit, use_mtime=True
    )


def unwrapped(model: Any) -> Any:
    """Return the model inside PEFT's wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@contextmanager
def uploading_without(*folders: str) -> Iterator[None]:
    """Leave folders of `output_dir` out of what the Trainer uploads to the hub in this block."""
    import transformers.trainer

    theirs: Any = transformers.trainer
    make = getattr(theirs, "hf_api", None)
    if make is None or hasattr(theirs, "upload_folder"):
        fail(
            "Expected a release of transformers whose Trainer can be told what not to upload (checked with "
            f"{CHECKED_WITH}). Got another: save_model('FOLDER') saves the model alone, and FOLDER can be uploaded."
        )
    theirs.hf_api = lambda *given, **named: _Uploads(make(*given, **named), folders)
    try:
        yield
    finally:
        theirs.hf_api = make


class _Uploads:
    """The hub, but for some folders of what is uploaded there."""

    def __init__(self, hub: Any, without: Sequence[str]) -> None:
        self._hub = hub
        self._without = [f"{folder}/*" for folder in without]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hub, name)

    def upload_folder(self, **named: Any) -> Any:
        given = named.pop("ignore_patterns", None) or []
        patterns = [given] if isinstance(given, str) else list(given)
        return self._hub.upload_folder(**named, ignore_patterns=[*patterns, *self._without])
