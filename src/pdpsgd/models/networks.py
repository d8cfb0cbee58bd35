"""The networks: the paper's two CNNs, those of IDP-SGD, small ones for digits and tables, and the user's own by name.

All of them give logits and are made of ordinary layers without batch statistics, so that every example's
gradient is its own. Every parameter starts from torch's default initialization; seed torch to repeat it.
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from pdpsgd.errors import check_one_of, check_positive, fail

Shape = tuple[int, ...]

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


def mnist_cnn(activation: str = "relu", *, classes: int = 10) -> nn.Sequential:
    """Return the paper's network for MNIST and Fashion-MNIST (1 x 28 x 28): 26,010 parameters.

    The paper's table says "max pooling, size (2,2)" without a stride; only stride 1 gives the number of
    parameters it reports.

    >>> count_parameters(mnist_cnn())
    26010
    """
    act = _activation(activation)
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=8, stride=2, padding=3),
        act(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, kernel_size=4, stride=2),
        act(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(512, 32),
        act(),
        nn.Linear(32, classes),
    )


def svhn_cnn(activation: str = "relu", *, classes: int = 10) -> nn.Sequential:
    """Return the paper's network for SVHN (3 x 32 x 32), of LeNet's shape: 62,006 parameters.

    >>> count_parameters(svhn_cnn())
    62006
    """
    act = _activation(activation)
    return nn.Sequential(
        nn.Conv2d(3, 6, kernel_size=5),
        act(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, kernel_size=5),
        act(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        act(),
        nn.Linear(120, 84),
        act(),
        nn.Linear(84, classes),
    )


def idp_mnist_cnn(activation: str = "tanh", *, classes: int = 10) -> nn.Sequential:
    """Return the network of IDP-SGD's public code for MNIST (1 x 28 x 28): 26,010 parameters.

    The paper's `mnist_cnn` but for tanh, and padding 2 in place of 3 in the first layer.

    >>> count_parameters(idp_mnist_cnn())
    26010
    """
    network = mnist_cnn(activation, classes=classes)
    network[0] = nn.Conv2d(1, 16, kernel_size=8, stride=2, padding=2)
    return network


def idp_svhn_cnn(activation: str = "tanh", *, classes: int = 10) -> nn.Sequential:
    """Return the network of IDP-SGD's public code for SVHN (3 x 32 x 32): 550,570 parameters.

    >>> count_parameters(idp_svhn_cnn())
    550570
    """
    act = _activation(activation)
    layers: list[nn.Module] = []
    width = 3
    for size in (32, 64, 128):
        layers += [nn.Conv2d(width, size, kernel_size=3, padding=1), act()]
        layers += [nn.Conv2d(size, size, kernel_size=3, padding=1), act(), nn.MaxPool2d(2)]
        width = size
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 128), act(), nn.Linear(128, classes))


def tabular_network(
    features: int, classes: int, *, hidden: Iterable[int] = (32,), activation: str = "tanh"
) -> nn.Sequential:
    """Return a small fully connected network for encoded tables.

    One narrow hidden layer by default: noise grows with the number of parameters, and bounded activations
    keep gradients below the clipping norm for longer.
    """
    act = _activation(activation)
    check_positive(features=features, classes=classes)
    layers: list[nn.Module] = [nn.Flatten()]
    width = features
    for size in hidden:
        check_positive(hidden=size)
        layers += [nn.Linear(width, size), act()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, classes))


def linear_model(features: int, classes: int) -> nn.Sequential:
    """Logistic regression: the fewest parameters, often the best model for few people or strict budgets."""
    return tabular_network(features, classes, hidden=())


def digits_network(activation: str = "tanh", *, classes: int = 10) -> nn.Sequential:
    """Return a network for scikit-learn's digits (1 x 8 x 8): 64-32-10, 2,410 parameters.

    Small enough to train privately on 1,437 people; at strict budgets `linear_model` is as good a choice.
    """
    return tabular_network(64, classes, activation=activation)


def count_parameters(model: nn.Module) -> int:
    """Count the numbers that are trained, and therefore get noise."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


@dataclass(frozen=True)
class BuiltIn:
    """A network that goes by a name: what it is, and how to make one for an input shape and some classes."""

    what: str
    make: Callable[[Shape, int, str | None], nn.Module]
    input_shape: Shape | None = None


BUILT_IN: dict[str, BuiltIn] = {
    "mnist-cnn": BuiltIn(
        "the paper's CNN for MNIST and Fashion-MNIST",
        lambda shape, classes, act: mnist_cnn(act or "relu", classes=classes),
        (1, 28, 28),
    ),
    "svhn-cnn": BuiltIn(
        "the paper's CNN for SVHN",
        lambda shape, classes, act: svhn_cnn(act or "relu", classes=classes),
        (3, 32, 32),
    ),
    "idp-mnist-cnn": BuiltIn(
        "IDP-SGD's CNN for MNIST",
        lambda shape, classes, act: idp_mnist_cnn(act or "tanh", classes=classes),
        (1, 28, 28),
    ),
    "idp-svhn-cnn": BuiltIn(
        "IDP-SGD's CNN for SVHN",
        lambda shape, classes, act: idp_svhn_cnn(act or "tanh", classes=classes),
        (3, 32, 32),
    ),
    "digits": BuiltIn(
        "a small network for scikit-learn's digits",
        lambda shape, classes, act: digits_network(act or "tanh", classes=classes),
        (1, 8, 8),
    ),
    "tabular": BuiltIn(
        "one hidden layer of 32, for tables and any other shape",
        lambda shape, classes, act: tabular_network(math.prod(shape), classes, activation=act or "tanh"),
    ),
    "linear": BuiltIn(
        "logistic regression, for any shape",
        lambda shape, classes, act: linear_model(math.prod(shape), classes),
    ),
}


def by_name(
    name: str, *, input_shape: Shape, classes: int | None, activation: str | None = None
) -> nn.Module:
    """Return a built-in network, or the user's own as `module:function`, for this input shape and number of classes.

    The function is called with those of `input_shape`, `classes` and `activation` that it has parameters for,
    and returns a torch module that gives one logit for each class. It may live in the working directory. Where
    `classes` is None, an own function decides.

    >>> count_parameters(by_name("linear", input_shape=(1, 8, 8), classes=10))
    650
    """
    if ":" in name:
        return _own_network(name, input_shape=input_shape, classes=classes, activation=activation)
    check_one_of((*BUILT_IN, "module:function"), model=name)
    built_in = BUILT_IN[name]
    if built_in.input_shape not in (None, tuple(input_shape)):
        fail(
            f"Expected inputs of shape {built_in.input_shape} for model {name!r}. Got {tuple(input_shape)}. "
            f"'tabular' and 'linear' take any shape."
        )
    return built_in.make(tuple(input_shape), classes or 1, activation)


def default_network(input_shape: Shape) -> str:
    """Name the built-in network for inputs of this shape: one made for it, else the small general one.

    >>> default_network((1, 28, 28)), default_network((13,))
    ('mnist-cnn', 'tabular')
    """
    made_for_it = (name for name, known in BUILT_IN.items() if known.input_shape == tuple(input_shape))
    return next(made_for_it, "tabular")


def _activation(name: str) -> Callable[[], nn.Module]:
    check_one_of(tuple(ACTIVATIONS), activation=name)
    return ACTIVATIONS[name]


def _own_network(name: str, **offered: Any) -> nn.Module:
    function = find_function(name)
    accepted = inspect.signature(function).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    given = {k: v for k, v in offered.items() if v is not None and (takes_any or k in accepted)}
    required = [
        p.name
        for p in accepted.values()
        if p.default is inspect.Parameter.empty
        and p.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    ]
    if missing := [p for p in required if p not in given]:
        fail(
            f"Expected model function {name!r} to need no arguments but input_shape, classes and activation. "
            f"It also needs {', '.join(map(repr, missing))}."
        )
    model = function(**given)
    if not isinstance(model, nn.Module):
        fail(f"Expected model function {name!r} to return a torch.nn.Module. Got {type(model).__name__}.")
    return model


def find_function(
    name: str, *, what: str = "model", example: str = "my_networks:small_cnn"
) -> Callable[..., Any]:
    """Find the user's own function, named as module:function, maybe in the working directory."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name or name.startswith("."):
        fail(f"Expected {what} as 'module:function', for example {example!r}. Got {name!r}.")
    sys.path.insert(0, os.getcwd())  # a console script does not see the working directory otherwise
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # the module is there, and something that it imports is not
        fail(
            f"Expected {what} {name!r} to name a module that can be imported from {os.getcwd()}. Found none."
        )
    finally:
        sys.path.pop(0)
    function = getattr(module, function_name, None)
    if not callable(function):
        fail(f"Expected {what} {name!r} to name a function in module {module_name!r}. Found none.")
    return function
