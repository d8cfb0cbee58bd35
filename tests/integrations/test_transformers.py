"""The Trainer of transformers with the real package, on small random models."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="the package transformers is not installed")
pytest.importorskip("accelerate", reason="the package accelerate is not installed")

import transformers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
    TrainingArguments,
)

import pdpsgd
from pdpsgd import Budgets, PdpsgdError, PrivacyEngine
from pdpsgd.engine.optimizer import PrivateOptimizer
from pdpsgd.integrations.padding import OneByOne, padded_to, public_length
from pdpsgd.integrations.token_losses import IGNORED, mean_over_own_tokens
from pdpsgd.integrations.transformers import PrivateTrainer, check_arguments
from pdpsgd.ledger import Ledger

transformers.logging.disable_progress_bar()
PEOPLE, LENGTH, STEPS = 36, 12, 4
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(27))]
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, model_max_length=32, **{f"{name}_token": word for name, word in named.items()}
    )


@pytest.fixture(scope="module")
def records(tokenizer):
    """Texts of 1 to 9 words; a label says which half of the vocabulary they come from."""
    numbers, found = np.random.default_rng(0), []
    for person in range(PEOPLE):
        words = numbers.integers(5, 32, size=1 + person % 9)
        text = " ".join(WORDS[word] for word in words)
        found.append({**tokenizer(text), "label": int(words.mean() > 18), "author": f"p{person:02}"})
    return found


@pytest.fixture(scope="module")
def budgets():
    return Budgets([2.0, 4.0, 8.0] * (PEOPLE // 3), 1e-5, ids=[f"p{person:02}" for person in range(PEOPLE)])


def classifier():
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(vocab_size=32, max_position_embeddings=32, **SIZES))


def arguments(folder, **more):
    known = {
        "per_device_train_batch_size": 6,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 2,
    }
    return TrainingArguments(str(folder), **{**known, **more})


@pytest.fixture
def make(tokenizer, records, budgets, tmp_path):
    def make(model=None, folder="out", said=None, **more):
        options = {
            "train_dataset": records,
            "processing_class": tokenizer,
            "budgets": budgets,
            "person_column": "author",
            "max_length": LENGTH,
            "noise_seed": 3,
        }
        return PrivateTrainer(
            model or classifier(), arguments(tmp_path / folder, **(said or {})), **{**options, **more}
        )

    return make


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- rows ---------------------------------------------------------------------------------------------------


def test_a_row_depends_on_its_own_record_alone_to_the_bit(tokenizer, records, make):
    """D against D': one record is exchanged for the longest possible one. Padding to the longest changes all rows."""
    longest = {**tokenizer(" ".join(["w1"] * LENGTH)), "label": 0, "author": "p00"}
    neighbor = [longest, *records[1:]]
    before, after = (make(train_dataset=each).private_records() for each in (records, neighbor))
    for number in range(1, len(records)):
        one, other = before[number], after[number]
        assert (
            one.keys()
            == other.keys()
            == {"input_ids", "attention_mask", "token_type_ids", "labels"} & one.keys()
        )
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert one["input_ids"].shape == (LENGTH,)
    plain = DataCollatorWithPadding(tokenizer)
    shapes = {
        plain([{"input_ids": row["input_ids"]} for row in each[:6]])["input_ids"].shape
        for each in (records, neighbor)
    }
    assert len(shapes) == 2  # what the collator does with whole batches


def test_random_masks_are_drawn_for_each_record_alone(tokenizer, records):
    rows = OneByOne(
        [{"input_ids": each["input_ids"]} for each in records],
        padded_to(DataCollatorForLanguageModeling(tokenizer), LENGTH),
    )
    torch.manual_seed(1)
    alone = rows[7]
    torch.manual_seed(1)
    assert all(torch.equal(value, alone[name]) for name, value in rows[7].items())
    assert alone["input_ids"].shape == alone["labels"].shape == (LENGTH,)


def test_texts_beyond_the_public_length_are_refused_and_the_length_is_public(tokenizer, records, make):
    rows = make(max_length=4).private_records()
    assert rows[2]["input_ids"].shape == (4,)
    with pytest.raises(PdpsgdError, match="truncation=True, max_length=N"):
        rows[8]
    assert make(max_length=None).private_records()[0]["input_ids"].shape == (32,)
    with pytest.raises(PdpsgdError, match="neither tokenizer nor model has a limit"):
        public_length(object(), None)


# --- training -----------------------------------------------------------------------------------------------


def test_a_run_takes_the_plan_s_steps_and_logs_no_loss(make, records, budgets, tmp_path, caplog):
    model = classifier()
    others = [{**record, "author": "somebody else"} for record in records[:6]]
    trainer = make(
        model, noise_seed=None, eval_dataset=others, said={"eval_strategy": "steps", "eval_steps": 2}
    )
    output = trainer.train()
    assert output.global_step == STEPS == trainer.engine.steps_taken
    assert np.isnan(output.training_loss)
    assert trainer.verdict().outcome == "holds for all"
    logged = [set(entry) for entry in trainer.state.log_history]
    assert not any("loss" in entry or "grad_norm" in entry for entry in logged)
    assert any("eval_loss" in entry for entry in logged)
    written = json.loads((tmp_path / f"out/checkpoint-{STEPS}/trainer_state.json").read_text())
    assert not any("loss" in entry for entry in written["log_history"])
    assert not [each for each in caplog.records if each.levelname in ("WARNING", "ERROR")]
    trainer.save_model(str(tmp_path / "model"))
    code = (
        "import sys, torch; from transformers import AutoModelForSequenceClassification as A;"
        f"A.from_pretrained({str(tmp_path / 'model')!r}); assert 'pdpsgd' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=300)
    loaded = BertForSequenceClassification.from_pretrained(tmp_path / "model")
    assert same(weights(loaded), weights(model))


def test_it_gets_what_a_plain_loop_gets(make, records, budgets):
    """Three lines around a plain loop, and the same parameters in the end: the Trainer adds nothing to a step."""
    trainer = make(said={"save_strategy": "no", "lr_scheduler_type": "constant", "optim": "sgd"})
    trainer.train()
    model = classifier()
    rows = trainer.private_records()
    _, optimizer, loader = PrivacyEngine().make_private(
        module=model.train(),
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-2),
        data_loader=torch.utils.data.DataLoader(rows),
        plan=trainer.engine.plan,
        budgets=budgets,
        max_physical_batch_size=6,
        seed=3,
    )
    torch.manual_seed(42)
    for batch in loader:
        optimizer.zero_grad()
        if len(batch["labels"]):
            model(**batch).loss.backward()
        optimizer.step()
    for (name, one), other in zip(trainer.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name, rtol=1e-3, atol=1e-4)


def test_how_many_people_were_sampled_rounds_nobody_s_gradient(make, monkeypatch):
    """A mean is passed back as a sum: weights stay, and so do a person's bits in batches of any size."""
    bits, sizes = {}, set()
    whole = PrivateOptimizer._add

    def noting(self, batch):
        if batch.size:
            sizes.add(batch.size)
            found = self._gradients.per_example_gradients(loss_reduction=self._loss_reduction)
            rows = torch.cat([part.flatten(1) for part in found.values()], 1)
            for place, record in enumerate(batch.records.tolist()):
                if record >= 0:
                    bits.setdefault((record, place % 4), set()).add(rows[place].numpy().tobytes())
        whole(self, batch)

    monkeypatch.setattr(PrivateOptimizer, "_add", noting)
    torch.manual_seed(0)
    without_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForSequenceClassification(
        BertConfig(vocab_size=32, max_position_embeddings=32, **SIZES, **without_dropout)
    )
    whole_steps = {"per_device_train_batch_size": 20, "gradient_accumulation_steps": 1, "max_steps": 8}
    make(model, said={"save_strategy": "no", "learning_rate": 0.0, "optim": "sgd", **whole_steps}).train()
    assert len(sizes) > 1
    assert len(bits) > 30
    assert all(len(each) == 1 for each in bits.values())


class StopsAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def test_a_run_that_was_stopped_goes_on_to_where_it_would_have_ended(make, tmp_path):
    said = {"save_steps": 2, "logging_steps": 1}
    whole = make(folder="whole", said=said)
    whole.train()
    stopped = make(said=said, callbacks=[StopsAt(3)])
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    with pytest.raises(PdpsgdError, match="would spend people's budgets again"):
        make().train()
    with pytest.raises(PdpsgdError, match="from its last step alone"):
        make().train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"))
    resumed = make(said=said)
    assert resumed.train(resume_from_checkpoint=True).global_step == STEPS
    assert same(weights(whole.model), weights(resumed.model))
    assert [entry["step"] for entry in resumed.state.log_history] == [1, 2, 3, 4]
    with pytest.raises(PdpsgdError, match="one train\\(\\) for each"):
        resumed.train()


def test_the_training_loss_is_logged_only_by_its_name(make):
    trainer = make(log_training_loss=True, said={"save_strategy": "no"})
    trainer.train()
    found = [entry for entry in trainer.state.log_history if "sensitive_training_loss" in entry]
    assert found
    assert all(0 < entry["sensitive_training_loss"] < 5 for entry in found)


def test_a_run_is_charged_to_its_ledger(make, budgets, tmp_path):
    ledger = Ledger.create(tmp_path / "people.ledger")
    trainer = make(ledger=ledger, spend="0.5", noise_seed=None)
    trainer.train()
    (run,) = ledger.runs()
    assert (run.state, run.people) == ("finished", PEOPLE)
    assert trainer.engine.plan.ledger.id == ledger.id
    assert trainer.verdict().outcome == "holds for all"


# --- adapters -----------------------------------------------------------------------------------------------


@pytest.fixture
def adapted():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"], lora_dropout=0.0)
    return peft.get_peft_model(classifier(), config)


def test_adapters_are_trained_and_the_base_is_untouched(make, adapted, tmp_path):
    """Opacus's issue 820: base weights that are not trained were changed silently."""
    before = weights(adapted)
    trainer = make(adapted)
    trainer.train()
    after = weights(adapted)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert changed <= trained
    assert any("lora_B" in name for name in changed)
    adapted.save_pretrained(tmp_path / "adapter")
    assert not list((tmp_path / "adapter").glob("model*.safetensors"))  # adapters alone
    peft = pytest.importorskip("peft")
    loaded = peft.PeftModel.from_pretrained(classifier(), tmp_path / "adapter").eval()
    inputs = {name: value[None] for name, value in trainer.private_records()[3].items() if name != "labels"}
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs).logits, adapted.eval()(**inputs).logits)


# --- losses over tokens -------------------------------------------------------------------------------------


def test_an_example_s_loss_is_the_mean_over_its_own_tokens():
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    labels[0, 2:] = -100
    labels[2] = -100
    alone = [mean_over_own_tokens(logits[i : i + 1], labels[i : i + 1], shifted=True) for i in range(3)]
    by_hand = nn.functional.cross_entropy(logits[0, :1], labels[0, 1:2])
    torch.testing.assert_close(alone[0], by_hand)
    torch.testing.assert_close(mean_over_own_tokens(logits, labels, shifted=True), sum(alone) / 3)


@pytest.mark.parametrize("masked", [True, False])
def test_language_models_are_trained_on_texts_of_any_length(make, tokenizer, records, masked):
    torch.manual_seed(0)
    texts = [{"input_ids": each["input_ids"], "author": each["author"]} for each in records]
    small = {"vocab_size": 32, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = (
        BertForMaskedLM(BertConfig(vocab_size=32, max_position_embeddings=32, **SIZES))
        if masked
        else GPT2LMHeadModel(GPT2Config(**small, pad_token_id=0, bos_token_id=2, eos_token_id=3))
    )
    trainer = make(
        model,
        train_dataset=texts,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=masked),
        noise_seed=None,
        said={"save_strategy": "no"},
    )
    trainer.train()
    assert trainer.verdict().outcome == "holds for all"


# --- a loop of one's own ------------------------------------------------------------------------------------


def test_three_lines_make_a_plain_loop_private(records, make, budgets, tmp_path):
    classifier().save_pretrained(tmp_path / "model")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert not model.training  # as from_pretrained gives it
    before = weights(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(make().private_records(), batch_size=6)

    plan = pdpsgd.plan(budgets, steps=3, batch_size=12)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, plan=plan, budgets=budgets
    )
    for batch in loader:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    assert engine.steps_left == 0
    assert not same(before, weights(model))


# --- many processes -----------------------------------------------------------------------------------------


def test_two_ranks_of_torchrun_train_adapters_as_one_process_does(tmp_path):
    """Everybody is in every step, and noise comes from one key: two ranks end where one does, so it enters once."""
    pytest.importorskip("peft")
    script = Path(__file__).with_name("trainer_on_ranks.py")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(port),
    ]
    done = subprocess.run(
        [*command, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert one["weights"] == other["weights"]
    assert one["ranks"] == 2
    assert min(one["people"], other["people"]) > 0
    assert set(one["changed"]) <= set(one["weights"])  # the base is as it was, on every rank
    assert one["changed"] == other["changed"]

    spec = importlib.util.spec_from_file_location("trainer_on_ranks", script)
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    alone = worker.train(tmp_path / "alone", per_device=worker.PEOPLE)
    assert one["people"] + other["people"] == alone["people"]
    for name, values in alone["weights"].items():
        torch.testing.assert_close(
            torch.tensor(one["weights"][name]), torch.tensor(values), rtol=1e-4, atol=1e-5
        )


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"bf16": True}, "Expected bf16=False"),
        ({"neftune_noise_alpha": 5.0}, "Expected neftune_noise_alpha=None"),
        ({"auto_find_batch_size": True}, "would follow from the records"),
        ({"max_grad_norm": 0.0}, "it is the clipping norm"),
        ({"include_num_input_tokens_seen": "all"}, "how many tokens people have is not protected"),
    ],
)
def test_arguments_that_would_break_the_promise_are_refused(make, said, message):
    with pytest.raises(PdpsgdError, match=message):
        make(said=said)


def test_one_process_has_one_device(tmp_path):
    said = arguments(tmp_path)
    check_arguments(said)
    said._n_gpu = 2
    with pytest.raises(PdpsgdError, match="Expected one device per process"):
        check_arguments(said)


def test_gradients_are_whole_on_each_rank(tmp_path):
    said = arguments(tmp_path)
    said.fsdp = ["full_shard"]
    with pytest.raises(PdpsgdError, match=r"Expected no fsdp.*Got \['full_shard'\]"):
        check_arguments(said)


def test_a_model_is_not_made_anew_for_each_trial(budgets, records, tmp_path):
    more = {"train_dataset": records, "budgets": budgets, "person_column": "author", "max_length": LENGTH}
    trainer = PrivateTrainer(model_init=classifier, args=arguments(tmp_path), **more)
    with pytest.raises(PdpsgdError, match="each of its trials would spend people's budgets"):
        trainer.train()


@pytest.mark.parametrize(
    ("more", "how", "message"),
    [
        ({}, {"trial": {"learning_rate": 1.0}}, "each of its trials would spend people's budgets"),
        (
            {},
            {"resume_from_checkpoint": True},
            r"Expected a run in output_dir to go on with\. Got '.*out', where none",
        ),
        ({"train_dataset": None}, {}, "Expected a train_dataset"),
        (
            {"train_dataset": [1] * PEOPLE, "person_column": None},
            {},
            r"Expected records that are mappings, such as a dict of columns\. Got int",
        ),
        (
            {
                "plan_options": {"mechanism": "adapdp", "rounds": 4, "weights": (0.9, 0.1)},
                "said": {"max_steps": -1, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 1},
            },
            {},
            "Expected a plan that trains one model",
        ),
        ({"budgets": None, "ledger": "people.ledger"}, {}, "Expected budgets, or a plan, with a ledger"),
        (
            {"data_collator": lambda rows: {"labels": torch.tensor(len(rows))}},
            {},
            r"one row for one record as 'labels'\. Got a tensor of shape \(\)",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_spent(
    make, tmp_path, monkeypatch, more, how, message
):
    monkeypatch.chdir(tmp_path)
    Ledger.create("people.ledger")
    with pytest.raises(PdpsgdError, match=message):
        make(**more).train(**how)
    assert not (tmp_path / "out/private/checkpoint.safetensors").exists()
    assert not Ledger("people.ledger").runs()


def test_people_are_known_before_anything_is_trained(make, records, budgets, tmp_path):
    with pytest.raises(PdpsgdError, match="a plan, or a ledger"):
        make(budgets=None)
    with pytest.raises(PdpsgdError, match="Got a record without: number 5"):
        make(train_dataset=[*records[:5], {**records[5], "author": None}]).train()
    plan = pdpsgd.plan(budgets, steps=STEPS + 1, batch_size=12)
    with pytest.raises(PdpsgdError, match=f"that of the plan, {STEPS + 1}"):
        make(plan=plan).train()
    with pytest.raises(PdpsgdError, match="chosen without the private data"):
        make().hyperparameter_search()
    assert not (tmp_path / "out/private/checkpoint.safetensors").exists()


# --- other people -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_evaluation_on_records_that_are_trained_on_is_refused(make, records, copied, named):
    others = [dict(record) for record in records] if copied else records
    trainer = make(eval_dataset={"own": others} if named else others, person_column=None)
    with pytest.raises(PdpsgdError, match="Expected other people in eval_dataset, who are not trained on"):
        trainer.train()
    assert trainer.state.global_step == 0


class Callback(TrainerCallback):
    """Do something at the end of every step, as scripts do."""

    def __init__(self, act):
        self.act = act

    def on_step_end(self, args, state, control, **_):
        self.act(self.trainer)


def with_callback(make, act, **more):
    callback = Callback(act)
    callback.trainer = make(callbacks=[callback], **more)
    return callback.trainer


@pytest.mark.parametrize("named", [True, False])
def test_evaluation_on_people_who_are_trained_on_is_refused_whenever_it_is_asked_for(make, records, named):
    """A callback that evaluates on the training records would log their loss, and write it beside the model."""
    act = lambda trainer: trainer.evaluate(records, metric_key_prefix="train")  # noqa: E731
    trainer = with_callback(make, act, person_column="author" if named else None, said={"save_steps": 1})
    with pytest.raises(PdpsgdError, match="Expected other people in eval_dataset, who are not trained on"):
        trainer.train()
    assert not any("train_loss" in entry for entry in trainer.state.log_history)


def test_another_record_of_a_person_who_is_trained_on_is_none_of_another_person(make, records, budgets):
    """Split by record, not by person: the promise is about all records of a person together."""
    trained = [{**record, "author": f"p{place // 2:02}"} for place, record in enumerate(records)]
    options = {"budgets": budgets, "records_per_person": 2}
    mixed = make(train_dataset=trained[::2], eval_dataset=trained[1::2], **options)
    with pytest.raises(PdpsgdError, match=r"Got 18 on the list, such as 'p00' \(column 'author'\)"):
        mixed.train()
    others = [{**record, "author": f"other {place}"} for place, record in enumerate(trained[1::2])]
    whole = make(
        folder="apart", train_dataset=trained[::2], eval_dataset={"a": others, "b": others}, **options
    )
    whole.train()
    assert {"eval_a_loss", "eval_b_loss"} <= whole.evaluate().keys()


class Hub:
    """What would be uploaded, by the rules of the hub's own client."""

    def __init__(self):
        self.uploaded = []

    def create_repo(self, name, **_):
        return type("Repository", (), {"repo_id": name})()

    def upload_folder(self, *, folder_path, ignore_patterns, **_):
        from huggingface_hub.utils import filter_repo_objects

        files = [path.relative_to(folder_path) for path in Path(folder_path).rglob("*") if path.is_file()]
        self.uploaded.append(set(filter_repo_objects(map(str, files), ignore_patterns=ignore_patterns)))


def test_the_key_and_what_people_were_promised_are_not_uploaded_with_the_model(make, monkeypatch, tmp_path):
    hub = Hub()
    monkeypatch.setattr("transformers.trainer.hf_api", lambda *_, **__: hub)
    trainer = with_callback(make, lambda trainer: trainer.push_to_hub(), said={"save_steps": 2})
    trainer.train()
    assert (tmp_path / "out" / "private" / "checkpoint.safetensors").exists()
    assert len(hub.uploaded) == STEPS
    for files in hub.uploaded:
        assert {"model.safetensors", "config.json", "public/plan.json", "README.md"} <= files
        assert not any(file.startswith(("private", "people")) for file in files)
    assert transformers.trainer.hf_api() is hub


def test_nothing_is_uploaded_by_a_trainer_that_cannot_be_told_what_to_leave_out(make, monkeypatch):
    monkeypatch.delattr("transformers.trainer.hf_api")
    with pytest.raises(PdpsgdError, match="can be told what not to upload"):
        make().push_to_hub()


def test_evaluation_on_other_records_is_taken(make, records, budgets):
    few = Budgets(budgets.epsilon[:20], 1e-5, ids=budgets.ids[:20])
    make(train_dataset=records[:20], eval_dataset=records[20:], budgets=few).train()


# --- encoders with decoders ---------------------------------------------------------------------------------

SMALL = {
    "vocab_size": 32, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2, "forced_eos_token_id": 3,
}  # fmt: skip


def t5():
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0)
    )


def pairs(people=PEOPLE):
    """A text of 1 to 9 words for each person, to be written backwards."""
    numbers, found = np.random.default_rng(0), []
    for person in range(people):
        words = numbers.integers(5, 32, size=1 + person % 9).tolist()
        filled = [0] * (LENGTH - 1 - len(words))
        mask = [1] * (1 + len(words)) + filled
        labels = [*words[::-1], 3, *([IGNORED] * len(filled))]
        found.append({"input_ids": [*words, 3, *filled], "attention_mask": mask, "labels": labels})
    return found


SEQUENCES = {
    "bart": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**SMALL)),
    "t5": t5,
    "marian": lambda: transformers.MarianMTModel(transformers.MarianConfig(**SMALL)),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_models_that_write_texts_train_and_weigh_every_person_alike(make, name):
    torch.manual_seed(0)
    model = SEQUENCES[name]()
    before = weights(model)
    collate = transformers.default_data_collator
    trainer = make(model, train_dataset=pairs(), data_collator=collate, person_column=None)
    trainer.train()  # warnings are errors
    assert trainer.state.global_step == STEPS
    assert not same(before, weights(model))
    batch = collate(pairs(6))
    model.eval()
    alone = [
        trainer.compute_loss(model, {key: value[i : i + 1] for key, value in batch.items()}) for i in range(6)
    ]
    theirs = [model(**{key: value[i : i + 1] for key, value in batch.items()}).loss for i in range(6)]
    assert torch.allclose(torch.stack(alone), torch.stack(theirs), atol=1e-5)
    assert torch.allclose(trainer.compute_loss(model, batch), torch.stack(theirs).mean(), atol=1e-5)


class WithSharedPositions(BertForSequenceClassification):
    """Looks positions up that all examples share, in the model itself: no layer around has a row per example."""

    def __init__(self, config):
        super().__init__(config)
        self.positions = nn.Embedding(32, 2)

    def forward(self, input_ids, **others):
        found = super().forward(input_ids, **others)
        found.logits = found.logits + self.positions(torch.arange(input_ids.shape[1])).mean(0)
        return found


def test_layers_that_cannot_be_trained_are_refused_before_anything_is_spent(make, budgets, tmp_path):
    ledger = Ledger.create(tmp_path / "people.ledger")
    model = WithSharedPositions(BertConfig(vocab_size=32, max_position_embeddings=32, **SIZES))
    with pytest.raises(PdpsgdError, match="before anything was read or spent"):
        make(model, ledger=ledger, noise_seed=None).train()
    assert not ledger.runs()
    make(ledger=ledger, noise_seed=None, folder="other").train()
    assert [run.state for run in ledger.runs()] == ["finished"]
