"""Modules with parameters of their own beside layers: run whole batches at a time, or left to the general rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdpsgd.errors import PdpsgdError
from pdpsgd.gradients.clipping import ClippedGradients
from pdpsgd.gradients.per_example import Blocks
from pdpsgd.gradients.rules import own_parameters
from tests.gradients.test_groups import compare

TIME, WIDTH = 5, 4


class Own(nn.Module):
    """A layer, then what is written in `use`, by parameters of its own."""

    shapes: tuple[tuple[int, ...], ...] = ((WIDTH,),)

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.after = nn.Linear(3, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.p = nn.ParameterList([torch.randn(shape) / 2 for shape in self.shapes])

    def forward(self, inputs: Tensor) -> Tensor:
        return self.use(torch.tanh(self.layer(inputs)))

    def use(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def of(use: Callable[[Own, Tensor], Tensor], *shapes: tuple[int, ...]) -> type[Own]:
    """Return a kind of module by how it uses parameters of these shapes."""
    return type("Uses", (Own,), {"use": use, "shapes": shapes or Own.shapes})


def tokens(self: Own, x: Tensor) -> Tensor:
    x = torch.cat([self.p[0].expand(len(x), -1, -1), x, self.p[1].repeat(len(x), 1, 1)], 1)
    return self.after(x + self.p[2])


def standardized(self: Own, x: Tensor) -> Tensor:
    weight = (self.p[0] - self.p[0].mean()) / self.p[0].std()
    return torch.sigmoid(F.linear(x, weight, self.p[1])) * torch.exp(self.p[2])


def overwrites(self: Own, x: Tensor) -> Tensor:
    x = self.after(x)
    x += self.p[0]
    x[:, 0] *= self.p[0]
    return x


def converted(self: Own, x: Tensor) -> Tensor:
    """What only looks at the kind of a tensor that has a row per example."""
    steps = torch.arange(WIDTH).to(x) + torch.arange(WIDTH).type_as(x) + x.new_ones(WIDTH)
    return x * self.p[0] + steps


def looked_up(self: Own, x: Tensor) -> Tensor:
    rows = (x[..., 0] > 0).long() + (x[..., 1] > 0).long()
    return x * F.embedding(rows, self.p[0]) + self.p[0][rows]


def convolved(self: Own, x: Tensor) -> Tensor:
    return F.conv1d(x.transpose(1, 2), torch.tanh(self.p[0]), self.p[1], padding=1).transpose(1, 2)


def routed(self: Own, x: Tensor) -> Tensor:
    hidden = torch.einsum("btd,edh->bteh", x, self.p[0])
    return torch.einsum("bteh,ehd->btd", hidden, self.p[1]) + torch.einsum("hd,btd->bth", self.p[2], x)


def experts(self: Own, x: Tensor) -> Tensor:
    """Matrices of which each is given something of its own; their numbers in three orders."""
    hidden = torch.einsum("b...d,edh->b...eh".replace("...", "t" * (x.dim() - 2)), x, self.p[0])
    for place, equation in enumerate(("beh,ehd->bed", "bed,edh->beh", "beh,hed->bed"), 1):
        if x.dim() == 3:
            equation = equation.replace("b", "bt")
        hidden = torch.tanh(torch.einsum(equation, hidden, self.p[place]))
    return hidden.sum(-2)


def attended(self: Own, x: Tensor) -> Tensor:
    queries, keys = self.p[0].expand(len(x), -1, -1), self.after(x)
    seen = F.scaled_dot_product_attention(queries[:, None], keys[:, None], x[:, None], self.p[1])
    return seen[:, 0] @ self.p[2].T


def filtered(self: Own, x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(self.p[0], dim=0) * torch.fft.rfft(x, dim=1)
    return torch.fft.irfft(spectrum, n=TIME, dim=1)


def normalized(self: Own, x: Tensor) -> Tensor:
    x = F.layer_norm(x, (WIDTH,), self.p[0], self.p[1], 1e-6)
    return F.prelu(F.rms_norm(x, (WIDTH,), self.p[0]), self.p[2])


def layered(self: Own, x: Tensor) -> Tensor:
    """A layer is given a parameter, with one row for all examples."""
    return x + self.after(self.p[0])


USES: dict[str, tuple[type[Own], tuple[int, ...]]] = {
    "scale": (of(lambda self, x: x * self.p[0] + 1 - self.p[0]), (3,)),
    "scale over positions": (of(lambda self, x: self.after(self.p[0] * x)), (TIME, 3)),
    "scale of images": (of(lambda self, x: x / (1 + self.p[0].square())[:, None], (TIME,)), (TIME, 3)),
    "a number": (of(lambda self, x: x * self.p[0] - self.p[0], ()), (TIME, 3)),
    "tokens": (of(tokens, (1, 1, WIDTH), (2, WIDTH), (TIME + 3, WIDTH)), (TIME, 3)),
    "standardized": (of(standardized, (WIDTH, WIDTH), (WIDTH,), (1, WIDTH)), (TIME, 3)),
    "overwrites": (of(overwrites), (TIME, 3)),
    "converted": (of(converted), (TIME, 3)),
    "looked up": (of(looked_up, (3, WIDTH)), (TIME, 3)),
    "convolved": (of(convolved, (WIDTH, WIDTH, 3), (WIDTH,)), (TIME, 3)),
    "routed": (of(routed, (2, WIDTH, 6), (2, 6, WIDTH), (WIDTH, WIDTH)), (TIME, 3)),
    "experts": (of(experts, (3, WIDTH, 9), (3, 9, 8), (3, 8, 9), (9, 3, 8)), (3,)),
    "experts over positions": (of(experts, (3, WIDTH, 9), (3, 9, 8), (3, 8, 9), (9, 3, 8)), (TIME, 3)),
    "attended": (of(attended, (2, WIDTH), (2, TIME), (3, WIDTH)), (TIME, 3)),
    "filtered": (of(filtered, (TIME, WIDTH)), (TIME, 3)),
    "normalized": (of(normalized, (WIDTH,), (WIDTH,), (TIME,)), (TIME, 3)),
    "given to a layer": (of(layered, (1, TIME, WIDTH)), (TIME, 3)),
    "matrices": (
        of(
            lambda self, x: self.p[0] @ (x @ self.p[1]) + x @ self.p[2].t(),
            (TIME, TIME),
            *[(WIDTH, WIDTH)] * 2,
        ),
        (TIME, 3),
    ),
    "a vector": (of(lambda self, x: (x @ self.p[0])[..., None] * x), (TIME, 3)),
    "matrices of heads": (of(lambda self, x: self.p[0] @ x[:, None], (2, 3, TIME)), (TIME, 3)),
    "one for all in einsum": (
        of(lambda self, x: torch.einsum("btd,de->bte", x[..., :1], self.p[0]), (3, 2)),
        (TIME, 3),
    ),
    "distances": (of(lambda self, x: torch.cdist(x, self.p[0]), (3, WIDTH)), (3,)),
    "distances of positions": (of(lambda self, x: torch.cdist(x, self.p[0]), (3, WIDTH)), (TIME, 3)),
}


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules that were left to the general rule."""
    found: list[str] = []
    original = own_parameters.OwnParameters.__init__

    def watched(self: Any, site: Any, module: nn.Module, forward: Any, general: Any) -> None:
        def noted(*args: Any, **kwargs: Any) -> Any:
            found.append(site.name)
            return general(*args, **kwargs)

        original(self, site, module, forward, noted)

    monkeypatch.setattr(own_parameters.OwnParameters, "__init__", watched)
    return found


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("name", USES)
def test_each_example_has_its_own_gradient(name: str, batch: int, oracle: Any, left: list[str]) -> None:
    """Also where a parameter has as many rows as the batch."""
    kind, shape = USES[name]
    oracle.check(kind().double(), torch.randn(batch, *shape, dtype=torch.float64))
    assert not left


@pytest.mark.parametrize("name", USES)
def test_a_persons_records_are_added_up(name: str, oracle: Any) -> None:
    kind, shape = USES[name]
    compare(oracle, kind(), torch.randn(7, *shape), [1, 4, 2], reduction="sum", tolerance=4e-5)


@pytest.mark.parametrize("name", ["experts", "experts over positions"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_experts_in_one_tensor_are_never_materialized(name: str, dtype: torch.dtype, oracle: Any) -> None:
    kind, shape = USES[name]
    module, inputs = kind().to(dtype), torch.randn(6, *shape, dtype=dtype)
    oracle.check(module, inputs, tolerance=2e-4 if dtype == torch.float32 else 1e-10)
    clipped = ClippedGradients(module)
    module(inputs).sum().backward()
    found = {id(parameter): gradient for parameter, gradient in clipped._gradients("sum", 6)}
    assert all(isinstance(found[id(parameter)], Blocks) for parameter in list(module.p)[1:])
    clipped.remove()


class Adapted(nn.Module):
    """A frozen layer and a product of two small matrices beside it, as adapters are often written."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 6).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(6, 2))
        self.scale = nn.Parameter(torch.randn(6), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs) + self.scale * ((inputs @ self.down.t()) @ self.up.t())
        return outputs


def test_frozen_layers_inside_a_module_do_not_leave_it_to_the_general_rule(
    oracle: Any, left: list[str]
) -> None:
    module = nn.Sequential(nn.Linear(4, 3), Adapted(), nn.Tanh(), nn.Linear(6, 2)).double()
    for batch in (1, 3, 6):
        oracle.check(module, torch.randn(batch, TIME, 4, dtype=torch.float64))
    assert not left


@pytest.mark.parametrize("name", ["experts", "experts over positions"])
def test_views_of_experts_are_added_up(name: str) -> None:
    kind, shape = USES[name]
    module, inputs = kind().double(), torch.randn(6, *shape, dtype=torch.float64)
    clipped = ClippedGradients(module)
    sums = []
    for views in (1, 2):
        clipped.zero_sums()
        module(inputs).square().sum().backward()
        norms = torch.full((6 // views,), 1e6)
        clipped.clipped_sum(norms, largest_clip_norm=1e6, loss_reduction="sum", views=views)
        sums.append(clipped.flat_sums[0].clone())
    assert torch.allclose(sums[0], 2 * sums[1], rtol=1e-9, atol=1e-12)
    clipped.remove()


def looks(self: Own, x: Tensor) -> Tensor:
    return x * self.p[0] if float(x.detach().sum()) > 0 else x - self.p[0]


def windows(self: Own, x: Tensor) -> Tensor:
    return (x.flatten(0, 1) * self.p[0]).view(len(x), -1, WIDTH)


def time_first(self: Own, x: Tensor) -> Tensor:
    return (x.transpose(0, 1) + self.p[0][:, None]).transpose(0, 1)


def unknown(self: Own, x: Tensor) -> Tensor:
    return torch.cross(x[..., :3], self.p[0].expand_as(x[0])[None, ..., :3], dim=-1)


def by_hand(self: Own, x: Tensor) -> Tensor:
    return F.linear(x * self.p[0], self.after.weight)


def flat_layer(self: Own, x: Tensor) -> Tensor:
    return self.after((x * self.p[0]).flatten(0, 1)).view(len(x), -1, WIDTH)


def shifted(self: Own, x: Tensor) -> Tensor:
    """What the layer gives for one row has a row per example, and no dimension for positions."""
    return x + self.p[0] * self.after(torch.linspace(0, 1, WIDTH).to(x)[None])


def shifted_apart(self: Own, x: Tensor) -> Tensor:
    return x * self.p[0] + self.after(torch.linspace(0, 1, WIDTH).to(x)[None])


def replaced(self: Own, x: Tensor) -> Tensor:
    """Examples mix, where there are such values: nobody else has to be there, and each is by itself."""
    return torch.where(x > 0.99, x.mean(), x) * self.p[0]


def centered(self: Own, x: Tensor) -> Tensor:
    return (x - x.mean(0, keepdim=True)) * self.p[0]


def distinct(self: Own, x: Tensor) -> Tensor:
    return x * self.p[0] / len(torch.unique(x > 0))


def positions_of_all(self: Own, x: Tensor) -> Tensor:
    return x * self.p[0] + self.after(torch.linspace(0, 1, TIME * WIDTH).view(TIME, WIDTH).to(x))


class Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        return gradients[0] * scale, (gradients[0] * x).flatten(0, -2).sum(0)


OTHERS: dict[str, type[Own]] = {
    "looks at numbers": of(looks),
    "windows": of(windows),
    "time first": of(time_first, (TIME, WIDTH)),
    "unknown": of(unknown),
    "a layer's weight": of(by_hand),
    "a layer on windows": of(flat_layer),
    "a layer on one row": of(shifted),
    "a layer on one row, added": of(shifted_apart),
    "a layer on what all share": of(positions_of_all),
    "what all make together": of(replaced),
    "a mean over all": of(centered),
    "distinct numbers": of(distinct),
    "a function of its own": of(lambda self, x: Opaque.apply(x, self.p[0])),  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 6])
@pytest.mark.parametrize("name", OTHERS)
def test_another_use_is_left_to_the_general_rule(name: str, batch: int, oracle: Any, left: list[str]) -> None:
    oracle.check(OTHERS[name]().double(), torch.randn(batch, TIME, 3, dtype=torch.float64))
    assert left


def test_a_parameter_that_is_dropped_out_is_every_examples_own(left: list[str]) -> None:
    model = of(lambda self, x: x * 0 + F.dropout(self.p[0], 0.5, self.training), (40 * WIDTH,))()
    model.layer = nn.Linear(3, 40 * WIDTH)
    clipped = ClippedGradients(model)
    outputs = model(torch.ones(2, 3))
    clipped.remove()
    assert not torch.equal(*outputs)
    assert left


def test_a_use_that_comes_later_is_left_to_the_general_rule(oracle: Any, left: list[str]) -> None:
    """What was settled in one mode of a module does not hold in another."""

    class Switching(Own):
        twice = False

        def use(self, x: Tensor) -> Tensor:
            return x * self.p[0] + (self.p[0] if self.twice else 0)

    model = Switching().double()
    clipped = ClippedGradients(model)
    inputs = torch.randn(4, 3, dtype=torch.float64)
    for twice in (False, True):
        model.twice = twice
        oracle.loss(model, (inputs,), 0, 4).backward()
        found = clipped.per_example_gradients()
        clipped.forget()
        with clipped.uninstrumented():
            expected = oracle.gradients(model, (inputs,), 4)
        clipped.forget()
        for name, parameter in model.named_parameters():
            assert torch.allclose(found[parameter], expected[name])
        assert bool(left) == twice
    clipped.remove()


def test_a_value_that_is_kept_for_later_is_refused() -> None:
    class Keeping(Own):
        kept: Any = None

        def use(self, x: Tensor) -> Tensor:
            before, self.kept = self.kept, 2 * self.p[0]
            return x * self.p[0] + (0 if before is None else before.sum())

    clipped = ClippedGradients(model := Keeping())

    def train() -> None:
        for _ in range(3):
            model(torch.randn(4, 3)).sum().backward()
            clipped.clipped_sum(torch.ones(4), loss_reduction="sum")

    with pytest.raises((PdpsgdError, RuntimeError)):
        train()
    clipped.remove()


def test_a_parameter_of_another_module_is_refused() -> None:
    """It would go without what it has passed on to it through a shared value."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, inputs: Tensor, weight: Tensor) -> Tensor:
            return F.linear(inputs, self.scale * weight)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(WIDTH, WIDTH), Scaled()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(self.layer(inputs), self.layer.weight)

    clipped = ClippedGradients(model := Tied())
    model(torch.randn(4, WIDTH)).sum().backward()
    with pytest.raises(PdpsgdError, match="outside their own module"):
        clipped.clipped_sum(torch.ones(4))
    clipped.remove()


def test_a_parameter_that_was_frozen_since_has_no_gradient() -> None:
    clipped = ClippedGradients(model := USES["scale over positions"][0]())
    for frozen in (False, True):
        model.p[0].requires_grad_(not frozen)
        model(torch.randn(4, TIME, 3)).sum().backward()
        clipped.zero_sums()
        clipped.clipped_sum(torch.ones(4))
        assert clipped.sums[model.layer.weight].any()
        assert bool(clipped.sums[model.p[0]].any()) != frozen
    clipped.remove()


def test_a_value_that_leaves_the_module_unseen_is_refused() -> None:
    class Leaking(Own):
        def use(self, x: Tensor) -> Any:
            self.kept = 2 * self.p[0]
            return x * self.p[0]

    clipped = ClippedGradients(model := Leaking())
    outputs = model(torch.randn(4, 3))
    with pytest.raises(PdpsgdError, match="within its forward"):
        (outputs.sum() + model.kept.sum()).backward()
    clipped.remove()


def test_a_module_may_be_called_several_times(oracle: Any, left: list[str]) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = of(lambda self, x: x * self.p[0])()
            self.scale.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.scale(torch.tanh(self.scale(inputs)))

    oracle.check(Shared().double(), torch.randn(4, TIME, WIDTH, dtype=torch.float64))
    assert not left


def test_layers_inside_keep_their_own_rules() -> None:
    """Their gradients come from what they are given, not from a copy of their weight for each example."""
    clipped = ClippedGradients(model := USES["tokens"][0]())
    model(torch.randn(4, TIME, 3)).sum().backward()
    names = {call.site.name for call in clipped._recorder.calls}
    clipped.remove()
    assert {"layer", "after"} <= names


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("bias", [True, False])
def test_recurrent_cells(kind: Any, bias: bool, oracle: Any, left: list[str]) -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = kind(3, WIDTH, bias=bias)

        def forward(self, inputs: Tensor) -> Tensor:
            state = None
            for step in inputs.unbind(1):
                state = self.cell(step, state)
            return state[0] if isinstance(state, tuple) else state

    model, inputs = Loop().double(), torch.randn(4, TIME, 3, dtype=torch.float64)
    before = model(inputs)
    clipped = ClippedGradients(model)
    assert torch.allclose(model(inputs), before, rtol=1e-12)
    clipped.remove()
    oracle.check(model, inputs)
    assert not left
