from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from pdpsgd.errors import PdpsgdError
from pdpsgd.models.networks import (
    BUILT_IN,
    by_name,
    count_parameters,
    linear_model,
    mnist_cnn,
    svhn_cnn,
    tabular_network,
)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_the_papers_networks_have_the_papers_number_of_parameters(activation: str) -> None:
    mnist, svhn = mnist_cnn(activation), svhn_cnn(activation)
    assert count_parameters(mnist) == 26_010
    assert count_parameters(svhn) == 62_006
    assert (
        2 * 26_010 + 62_006
    ) // 3 == 38_008  # the paper's average over three data sets is 38,009 rounded up


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (mnist_cnn(), (1, 28, 28)),
        (svhn_cnn(), (3, 32, 32)),
        (tabular_network(7, 10), (7,)),
        (linear_model(7, 10), (7,)),
    ],
)
def test_networks_give_one_logit_for_each_class(model: nn.Module, shape: tuple[int, ...]) -> None:
    logits = model(torch.randn(5, *shape))
    assert logits.shape == (5, 10)
    assert not torch.allclose(logits.sum(1), torch.ones(5))  # logits, not probabilities


@pytest.mark.parametrize("model", [mnist_cnn(), svhn_cnn(), tabular_network(7, 3)])
def test_networks_work_on_an_empty_batch(model: nn.Module) -> None:
    shape = {26_010: (1, 28, 28), 62_006: (3, 32, 32)}.get(count_parameters(model), (7,))
    assert model(torch.zeros(0, *shape)).shape[0] == 0


@pytest.mark.parametrize("name", list(BUILT_IN))
def test_no_built_in_network_mixes_examples(name: str) -> None:
    shape = BUILT_IN[name].input_shape or (1, 28, 28)
    model = by_name(name, input_shape=shape, classes=10)
    inputs = torch.randn(4, *shape)
    alone = torch.cat([model(inputs[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(model(inputs), alone, rtol=1e-4, atol=1e-5)


def test_an_unknown_activation_is_refused_by_name() -> None:
    with pytest.raises(PdpsgdError, match=r"'relu', 'tanh'.*activation='gelu'"):
        mnist_cnn("gelu")


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PdpsgdError, match=r"'mnist-cnn'.*'module:function'.*model='resnet'"):
        by_name("resnet", input_shape=(1, 28, 28), classes=10)


def test_a_network_for_other_images_is_refused() -> None:
    with pytest.raises(PdpsgdError, match=r"shape \(1, 28, 28\) for model 'mnist-cnn'. Got \(3, 32, 32\)"):
        by_name("mnist-cnn", input_shape=(3, 32, 32), classes=10)


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = "own_networks_of_a_user"
    (tmp_path / f"{name}.py").write_text(
        "from torch import nn\n"
        "def plain(): return nn.Linear(3, 2)\n"
        "def fitted(input_shape, classes): return nn.Linear(input_shape[0], classes)\n"
        "def anything(**settings): return nn.Linear(settings['input_shape'][0], settings['classes'])\n"
        "def greedy(classes, depth): return nn.Linear(3, classes)\n"
        "def not_a_network(): return 'cnn'\n"
        "value = 3\n"
    )
    (tmp_path / "own_broken.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


@pytest.mark.parametrize(("function", "width"), [("plain", 3), ("fitted", 4), ("anything", 4)])
def test_a_users_network_gets_the_settings_it_asks_for(own_module: str, function: str, width: int) -> None:
    model = by_name(f"{own_module}:{function}", input_shape=(4,), classes=2)
    assert isinstance(model, nn.Linear)
    assert model.in_features == width


def test_loading_a_users_network_leaves_the_module_path_as_it_was(own_module: str) -> None:
    before = list(sys.path)
    by_name(f"{own_module}:plain", input_shape=(4,), classes=2)
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_networks_of_a_user:greedy", "'depth'"),
        ("own_networks_of_a_user:not_a_network", r"torch.nn.Module. Got str"),
        ("own_networks_of_a_user:missing", "name a function in module 'own_networks_of_a_user'"),
        ("own_networks_of_a_user:value", "name a function in module"),
        ("no_such_module_here:f", "can be imported from"),
        (":f", "'my_networks:small_cnn'"),
    ],
)
def test_what_is_wrong_with_a_users_network_is_said(own_module: str, name: str, message: str) -> None:
    with pytest.raises(PdpsgdError, match=message):
        by_name(name, input_shape=(4,), classes=2)


def test_an_import_error_inside_the_users_module_is_shown_as_it_is(own_module: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="a_package_that_nobody_has"):
        by_name("own_broken:f", input_shape=(4,), classes=2)
