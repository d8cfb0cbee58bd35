"""Many ranks train one model: noise once, the same bits everywhere, and the same result as one process."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pdpsgd.engine.distributed import Ranks
from pdpsgd.errors import PdpsgdError
from pdpsgd.ledger import Ledger

WORKER = Path(__file__).with_name("worker.py")
ROOT = WORKER.parents[3]
TIMEOUT = 300


def load_worker():
    spec = importlib.util.spec_from_file_location("distributed_worker", WORKER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Finished:
    """Ranks that were started as torchrun would, and what each of them found."""

    def __init__(self, tasks, folder, world_size):
        self.folder, self.world_size = folder, world_size
        environment = os.environ | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(world_size),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        processes = [
            subprocess.Popen(
                [sys.executable, str(WORKER), *tasks, str(folder)],
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]
        try:
            self.errors = [process.communicate(timeout=TIMEOUT)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
        self.codes = [process.returncode for process in processes]

    def found(self, what):
        """What each rank found in one task."""
        files = [self.folder / f"{what}.{rank}.json" for rank in range(self.world_size)]
        assert all(file.exists() for file in files), "\n".join(self.errors)
        return [json.loads(file.read_text()) for file in files]


TASKS = [
    *("compare", "resume", "disagree", "differ", "differ_in_one_of_many", "differ_in_models", "forfeit"),
    *("untold_order", "assumed_on_one_rank"),
    *("sources", "noninterference", "unseen_on_one_rank", "unseen_collation_on_one_rank", "sensitivity"),
]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return Finished([*TASKS, "die"], tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory):
    return Finished(["compare"], tmp_path_factory.mktemp("three"), 3)


@pytest.fixture(params=[2, 3])
def compared(request):
    ranks = request.getfixturevalue("two_ranks" if request.param == 2 else "three_ranks")
    return request.param, ranks.found("compare")


@pytest.mark.parametrize("name", ["everybody", "some", "nobody", "one person", "many records", "filtered"])
def test_for_given_draws_the_result_is_that_of_one_process(compared, name):
    """As noise enters in both, this also says that it enters once: twice would be off by far more."""
    world_size, found = compared
    alone = load_worker().train_alone(name, world_size)
    torch.testing.assert_close(
        torch.tensor(found[0][name]["weights"]), torch.tensor(alone), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    "name", ["everybody", "some", "nobody", "one person", "many records", "filtered", "limited", "secret"]
)
def test_all_ranks_hold_the_same_bits(compared, name):
    _, found = compared
    assert all(one[name]["weights"] == found[0][name]["weights"] for one in found)


def test_ranks_stay_in_step_when_one_of_them_draws_nobody(compared):
    world_size, found = compared
    sizes = [one["one person"]["sizes"] for one in found]
    assert all(len(one) == 12 for one in sizes)
    assert any(sizes[0]), "the one person is rank 0's, and is drawn in some step"
    assert not any(any(one) for one in sizes[1:])
    assert len(sizes) == world_size


def test_everybody_is_on_one_rank_only(compared):
    _, found = compared
    assert sum(one["everybody"]["sizes"][0] for one in found) == 31


def test_limited_physical_batches_need_not_be_as_many_on_every_rank(compared):
    _, found = compared
    torch.testing.assert_close(
        torch.tensor(found[0]["limited"]["weights"]),
        torch.tensor(found[0]["some"]["weights"]),
        rtol=1e-4,
        atol=1e-5,
    )


def test_a_resumed_run_ends_where_the_whole_one_does_and_refuses_another_number_of_ranks(two_ranks):
    found = two_ranks.found("resume")
    assert all(one["resumed"] == found[0]["whole"] for one in found)
    assert all(one["spent after resuming"] == one["spent"] for one in found)
    assert any(value == pytest.approx(2.5) for value in found[0]["spent"]), "somebody's filter has closed"
    worker = load_worker()
    alone = worker.make_private(worker.PLANS["some"])
    with pytest.raises(PdpsgdError, match=r"Expected the number of ranks .*: 2\. Got 1\."):
        alone.resume(two_ranks.folder / "shared.safetensors")


def test_ranks_with_different_plans_are_stopped(two_ranks):
    assert all("same plan on all ranks" in one["error"] for one in two_ranks.found("disagree"))


@pytest.mark.parametrize("what", ["inputs", "targets", "order of a dataset"])
def test_ranks_with_different_data_are_stopped(two_ranks, what):
    assert all("same data on all ranks" in one[what] for one in two_ranks.found("differ"))


def test_ranks_that_find_people_s_records_in_different_places_are_stopped(two_ranks):
    assert all("same records of people on all ranks" in one["places"] for one in two_ranks.found("differ"))


def test_one_differing_record_among_hundreds_that_are_no_tensors_is_found(two_ranks):
    for one in two_ranks.found("differ_in_one_of_many"):
        assert "same data on all ranks" in one["another"]
        assert "same data on all ranks" in one["held twice"]
        assert one["the same"] == ""


def test_ranks_with_different_models_are_stopped_and_those_with_the_same_are_not(two_ranks):
    for one in two_ranks.found("differ_in_models"):
        assert "same model on all ranks" in one["frozen"]
        assert "same model on all ranks" in one["shapes"]
        assert one["same"] == ""


def test_ranks_at_different_steps_are_stopped_before_anything_is_released(two_ranks):
    first, second = (one["one"] for one in two_ranks.found("forfeit"))
    assert "Expected all ranks to be at step 2, as rank 0 is" in first["error"]
    assert "Expected rank 0 to release the step" in second["error"]
    assert first["weights"] == second["weights"]
    assert first["steps"] == 2


def test_a_step_that_all_ranks_skip_is_skipped(two_ranks):
    first, second = (one["both"] for one in two_ranks.found("forfeit"))
    assert first == second
    assert first["error"] is None
    assert first["steps"] == 5


def test_key_and_generator_are_those_of_rank_0_and_so_is_what_is_known_of_them(two_ranks):
    first, second = two_ranks.found("sources")
    assert first == second
    assert first["seeded"]["reasons"] == ["seeded"]
    assert first["secret"]["reasons"] == []


def test_code_that_the_guards_of_one_rank_cannot_see_through_is_in_every_rank_s_verdict(two_ranks):
    first, second = two_ranks.found("unseen_on_one_rank")
    assert [reason["code"] for reason in first["reasons"]] == ["unseen-code"]
    assert "on another rank" in first["reasons"][0]["sentence"]
    assert [reason["code"] for reason in second["reasons"]] == ["unseen-code"]
    assert "backward() was given a gradient" in second["reasons"][0]["sentence"]


@pytest.mark.parametrize("odd", [0, 1])
def test_a_collation_that_one_rank_cannot_check_is_in_every_rank_s_verdict(two_ranks, odd):
    for rank, found in enumerate(two_ranks.found("unseen_collation_on_one_rank")):
        (reason,) = found[f"rank {odd}"]["reasons"]
        assert reason["code"] == "unseen-code"
        assert ("collate_fn" if rank == odd else "on another rank") in reason["sentence"]
        assert found["none"]["reasons"] == []


def test_ranks_that_nobody_can_tell_read_the_same_records_say_so(two_ranks):
    """Where they read them in orders of their own, somebody's record is used for two people."""
    for found in two_ranks.found("untold_order"):
        odd, told = found["a generator of its own"], found["torch's"]
        assert [reason["code"] for reason in odd["reasons"]] == ["unseen-code"]
        assert any("in the same order could not be checked" in each for each in odd["warned"])
        assert (told["reasons"], told["warned"]) == ([], [])


def test_what_is_assumed_of_the_model_on_one_rank_is_in_every_rank_s_verdict(two_ranks):
    for found in two_ranks.found("assumed_on_one_rank"):
        assert "assumed" not in found["none"]
        assert len(found["from the start"]["assumed"]) == 1
        assert found["resumed"]["assumed"] == found["from the start"]["assumed"]


def test_with_ranks_too_a_record_moves_the_noise_free_sum_by_its_clipping_norm_at_most(two_ranks):
    first, second = two_ranks.found("sensitivity")
    assert [one["case"] for one in first] == [one["case"] for one in second]
    assert len(first) >= 20
    assert sum(one["distance"] > 0 for one in first) >= 5, "records that move nothing say nothing"
    assert all(one["distance"] <= one["clip norm"] for one in first)


@pytest.mark.parametrize("how", ["in one go", "resumed"])
def test_ranks_publish_nothing_of_a_record_that_was_never_sampled(two_ranks, how):
    first, second = two_ranks.found("noninterference")
    assert {"model.safetensors", "result.json", "plan.json", "settings.json"} <= set(first[how]["before"])
    for one in (first, second):
        assert one[how]["unseen"] == one[how]["before"]
        assert one[how]["seen"]["model"] != one[how]["before"]["model"]


@pytest.mark.parametrize("how", ["in one go", "resumed"])
def test_ranks_publish_nothing_but_what_follows_from_the_noised_sums(two_ranks, how):
    for one in two_ranks.found("noninterference"):
        assert one[how]["replayed"] == one[how]["recorded"]


def test_a_rank_that_dies_stops_the_others_with_an_error(two_ranks):
    assert two_ranks.codes == [0, 9], "\n".join(two_ranks.errors)
    survivor = json.loads((two_ranks.folder / "die.0.json").read_text())
    assert "Expected every rank to answer" in survivor["error"]
    assert survivor["steps"] < 200


def test_when_a_rank_is_killed_all_others_end_with_the_project_s_error_and_none_aborts(tmp_path):
    three = Finished(["killed"], tmp_path, 3)
    assert three.codes == [1, -9, 1], "\n".join(three.errors)  # an abort would be -6
    assert all("PdpsgdError: Expected every rank to answer" in three.errors[rank] for rank in (0, 2))


def test_under_torchrun_the_same_script_trains_data_parallel(tmp_path):
    ledger = Ledger.create(tmp_path / "people.ledger")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    done = subprocess.run(
        [*command, str(free_port()), str(WORKER), "fit", "fit_in_ledger", str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"fit.{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1]
    assert (tmp_path / "run" / "public" / "model.safetensors").exists()
    assert (tmp_path / "run" / "public" / "result.json").exists()
    found = [json.loads((tmp_path / f"fit_in_ledger.{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1]
    assert found[0]["verdict"]["reasons"] == []
    assert [(run.state, run.attempt) for run in ledger.runs()] == [("finished", 1)]  # one run, charged once


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: none was found here")
def test_ranks_on_gpus_join_by_nccl():
    from pdpsgd.engine.distributed import Ranks

    assert Ranks.join(device=torch.device("cuda")).world_size >= 1


def test_processes_that_are_not_told_where_they_meet_do_not_train_each_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PdpsgdError, match="MASTER_ADDR beside WORLD_SIZE = 2"):
        Ranks.join()
    for alone in ("1", None):
        monkeypatch.delenv("WORLD_SIZE") if alone is None else monkeypatch.setenv("WORLD_SIZE", alone)
        assert Ranks.join() == Ranks(0, 1)
