"""One rank of a `PrivateTrainer` with adapters, as torchrun starts it: `trainer_on_ranks.py FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import peft
import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import pdpsgd
from pdpsgd.integrations.transformers import PrivateTrainer

PEOPLE, LENGTH, STEPS = 24, 6, 3


def records():
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(1, 20, (PEOPLE, LENGTH), generator=generator)
    return [{"input_ids": row, "label": int(row[0] > 10)} for row in tokens]


def train(folder: Path, *, per_device: int):
    """Train adapters; everybody is in every step, so that the draws are the same on any number of ranks."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(BertConfig(vocab_size=20, **sizes, **no_dropout))
    adapters = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
    model = peft.get_peft_model(model, adapters)
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=per_device,
        max_steps=STEPS,
        learning_rate=0.1,
        optim="sgd",
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="steps",
        save_steps=2,
    )
    budgets = pdpsgd.Budgets([20.0] * PEOPLE, 1e-5)
    data = records()
    trainer = PrivateTrainer(
        model, arguments, train_dataset=data, eval_dataset=data[:6], budgets=budgets, noise_seed=7
    )
    people, backward = [], trainer._backward
    trainer._backward = lambda batch: (people.append(len(batch["labels"])), backward(batch))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.train()
    after = model.state_dict()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {
        "weights": {name: value.flatten().tolist() for name, value in after.items() if name in trained},
        "changed": sorted(name for name in after if not torch.equal(before[name], after[name])),
        "people": sum(people),
        "ranks": trainer.engine.ranks.world_size,
        "eval_loss": trainer.evaluate()["eval_loss"],
    }


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    found = train(folder / "out", per_device=PEOPLE // 2)
    rank = torch.distributed.get_rank()
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
