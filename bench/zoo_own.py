"""More networks to measure a training step on: with parameters of their own, beside or instead of layers."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo import VOCABULARY, Network, PlainAttention, Residual, ToLast, images, mlp, tokens


class LayerScale(nn.Module):
    """A factor for each feature (Touvron et al. 2021)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.factors = nn.Parameter(0.1 * torch.ones(width))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.factors


class Deit(nn.Module):
    """A ViT with a class token, a table of positions and layer scales, on patches of 4 x 4 of images of 32 x 32."""

    def __init__(self, width: int = 96, heads: int = 3, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 65, width) * 0.02)
        layers: list[nn.Module] = []
        for _ in range(depth):
            inner = [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
            layers += [
                Residual(nn.LayerNorm(width), PlainAttention(width, heads), LayerScale(width)),
                Residual(nn.LayerNorm(width), *inner, LayerScale(width)),
            ]
        self.blocks = nn.Sequential(*layers)
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        patches = self.patches(inputs).flatten(2).transpose(1, 2)
        joined = torch.cat([self.token.expand(len(inputs), -1, -1), patches], 1) + self.positions
        logits: Tensor = self.out(self.norm(self.blocks(joined))[:, 0])
        return logits


class ChannelsNorm(nn.Module):
    """LayerNorm with a scale and a shift of its own, of channels last or first."""

    def __init__(self, width: int, *, first: bool = False) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.first = first

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.first:
            return F.layer_norm(inputs, inputs.shape[-1:], self.weight, self.bias, 1e-6)
        centered = inputs - inputs.mean(1, keepdim=True)
        scaled = centered * torch.rsqrt(centered.square().mean(1, keepdim=True) + 1e-6)
        return self.weight[:, None, None] * scaled + self.bias[:, None, None]


class ResponseNorm(nn.Module):
    """Global response normalization (Woo et al. 2023)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(1, 1, 1, width))
        self.shift = nn.Parameter(torch.zeros(1, 1, 1, width))

    def forward(self, inputs: Tensor) -> Tensor:
        sizes = inputs.norm(dim=(1, 2), keepdim=True)
        return self.scale * (inputs * (sizes / (sizes.mean(-1, keepdim=True) + 1e-6))) + self.shift + inputs


def convnext_v2() -> nn.Module:
    """ConvNeXt V2 blocks, with norms of their own."""

    def block(width: int) -> nn.Module:
        return Residual(
            nn.Conv2d(width, width, 7, padding=3, groups=width),
            ToLast(0, 2, 3, 1),
            ChannelsNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            ResponseNorm(4 * width),
            nn.Linear(4 * width, width),
            ToLast(0, 3, 1, 2),
        )

    stages: list[nn.Module] = [nn.Conv2d(3, 32, 4, 4), ChannelsNorm(32, first=True)]
    for before, width in ((32, 32), (32, 64), (64, 128)):
        if before != width:
            stages += [ChannelsNorm(before, first=True), nn.Conv2d(before, width, 2, 2)]
        stages += [block(width), block(width)]
    return nn.Sequential(
        *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(128), nn.Linear(128, 10)
    )


class FeatureTransformer(nn.Module):
    """Each number of a table becomes a token by a weight and a bias of its own (FT-Transformer)."""

    def __init__(self, features: int = 20, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.randn(features, width) * 0.1) for _ in range(2))
        self.token = nn.Parameter(torch.randn(width) * 0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.out = nn.Sequential(nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, numbers: Tensor) -> Tensor:
        features = numbers[..., None] * self.weight + self.bias
        x = torch.cat([self.token.expand(len(numbers), 1, -1), features], 1)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.out(x[:, 0])
        return logits


class WaveNet(nn.Module):
    """Gated, dilated, causal convolutions whose skips are added up."""

    def __init__(self, width: int = 32, depth: int = 6) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, 1)
        self.gated = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=2**i) for i in range(depth))
        self.skips = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(depth))
        self.onward = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(depth))
        pooled = [nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(width, 10)]
        self.last = nn.Sequential(nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), *pooled)

    def forward(self, signals: Tensor) -> Tensor:
        x = self.first(signals)
        total = torch.zeros_like(x)
        for layer, skip, onward in zip(self.gated, self.skips, self.onward, strict=True):
            dilation: Any = layer.dilation
            wave, gate = layer(F.pad(x, (dilation[0], 0))).chunk(2, 1)
            x_or_skip = torch.tanh(wave) * torch.sigmoid(gate)
            total, x = total + skip(x_or_skip), x + onward(x_or_skip)
        logits: Tensor = self.last(total)
        return logits


class Diffusion(nn.Module):
    """A U-Net with attention at its bottom, as diffusion models have it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()

        def two(before: int, after: int) -> nn.Module:
            layers = [
                [nn.GroupNorm(8, one), nn.SiLU(), nn.Conv2d(one, after, 3, padding=1)]
                for one in (before, after)
            ]
            shortcut = nn.Conv2d(before, after, 1) if before != after else None
            return Residual(*itertools.chain(*layers), shortcut=shortcut)

        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down, self.up = (
            nn.Conv2d(width, 2 * width, 3, 2, 1),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1),
        )
        self.above, self.below, self.joined = (
            two(width, width),
            two(2 * width, 2 * width),
            two(2 * width, width),
        )
        self.norm = nn.GroupNorm(8, 2 * width)
        self.mixed, self.seen = nn.Conv2d(2 * width, 6 * width, 1), nn.Conv2d(2 * width, 2 * width, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        above = self.above(self.first(inputs))
        below = self.below(self.down(above))
        batch, width, height, breadth = below.shape
        mixed = self.mixed(self.norm(below)).reshape(batch, 3, 4, width // 4, height * breadth)
        seen = F.scaled_dot_product_attention(*mixed.transpose(-1, -2).unbind(1))
        below = below + self.seen(seen.transpose(-1, -2).reshape(below.shape))
        outputs: Tensor = self.last(self.joined(torch.cat([self.up(below), above], 1)))
        return outputs


class MambaBlock(nn.Module):
    """A selective state space, in plain operations (Gu & Dao 2023)."""

    def __init__(self, width: int, state: int = 8) -> None:
        super().__init__()
        inner, self.state = 2 * width, state
        self.norm, self.given = nn.LayerNorm(width), nn.Linear(width, 2 * inner, bias=False)
        self.near = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.selected, self.step = nn.Linear(inner, 2 * state + 2, bias=False), nn.Linear(2, inner)
        self.decay = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(inner, 1))
        self.through = nn.Parameter(torch.ones(inner))
        self.out = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        time = x.shape[1]
        hidden, gate = self.given(self.norm(x)).chunk(2, -1)
        hidden = F.silu(self.near(hidden.transpose(1, 2))[..., :time].transpose(1, 2))
        step, enter, show = self.selected(hidden).split([2, self.state, self.state], -1)
        step = F.softplus(self.step(step))
        kept = torch.exp(step[..., None] * -torch.exp(self.decay))
        entering = (step * hidden)[..., None] * enter[:, :, None]
        state, shown = torch.zeros_like(kept[:, 0]), []
        for now in range(time):
            state = kept[:, now] * state + entering[:, now]
            shown.append((state * show[:, now, None]).sum(-1))
        outputs = torch.stack(shown, 1) + hidden * self.through
        return x + self.out(outputs * F.silu(gate))


class Mamba(nn.Module):
    """Two such blocks on tokens."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.out = nn.Embedding(VOCABULARY, width), nn.Linear(width, 10)
        self.blocks = nn.Sequential(MambaBlock(width), MambaBlock(width))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.out(self.blocks(self.tokens(tokens)).mean(1))
        return logits


class Mixture(nn.Module):
    """Four experts in two tensors, softly routed."""

    def __init__(self, width: int = 64, experts: int = 4) -> None:
        super().__init__()
        self.given, self.gate, self.out = (
            nn.Linear(32, width),
            nn.Linear(width, experts),
            nn.Linear(width, 10),
        )
        self.one = nn.Parameter(torch.randn(experts, width, 2 * width) * 0.1)
        self.two = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        x = F.relu(self.given(inputs))
        hidden = F.gelu(torch.einsum("bd,edh->beh", x, self.one))
        outputs = torch.einsum("beh,ehd->bed", hidden, self.two)
        logits: Tensor = self.out(x + (self.gate(x).softmax(-1)[..., None] * outputs).sum(1))
        return logits


class Prototypes(nn.Module):
    """Distances of an encoded image to a prototype of each class."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()]
        self.encoder = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32 * 49, width))
        self.prototypes, self.scale = nn.Parameter(torch.randn(10, width)), nn.Parameter(torch.tensor(0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        return -self.scale * torch.cdist(self.encoder(inputs), self.prototypes)


class PointNet(nn.Module):
    """Points turned by a matrix of their own, a network on each, and the maximum over them."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Sequential(nn.Conv1d(3, 32, 1), nn.ReLU(), nn.Conv1d(32, 64, 1), nn.ReLU())
        self.matrix, self.out = mlp(64, 32, 9), mlp(128, 64, 10)
        layers = [
            [nn.Conv1d(before, width, 1), nn.GroupNorm(8, width), nn.ReLU()]
            for before, width in ((3, 32), (32, 128))
        ]
        self.points = nn.Sequential(*itertools.chain(*layers))

    def forward(self, points: Tensor) -> Tensor:
        turned = self.matrix(self.turn(points).amax(2)).view(-1, 3, 3) + torch.eye(3)
        logits: Tensor = self.out(self.points(turned @ points).amax(2))
        return logits


class DeepSets(nn.Module):
    """A network on each element, and one on the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.whole = mlp(3, 64, 64, 64), mlp(64, 64, 10)

    def forward(self, elements: Tensor) -> Tensor:
        logits: Tensor = self.whole(self.each(elements).sum(1))
        return logits


class CellByCell(nn.Module):
    """Embedded tokens through an LSTM cell, one after the other."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.cell = nn.Embedding(VOCABULARY, width), nn.LSTMCell(width, width)
        self.out = nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        state = None
        for given in self.tokens(tokens).unbind(1):
            state = self.cell(given, state)
        assert state is not None
        logits: Tensor = self.out(state[0])
        return logits


MORE: dict[str, Network] = {
    "deit": Network(Deit, images(3, 32, 32), 32),
    "convnext-v2": Network(convnext_v2, images(3, 32, 32), 32),
    "ft-transformer": Network(FeatureTransformer, images(20)),
    "wavenet": Network(WaveNet, images(1, 128)),
    "diffusion": Network(Diffusion, images(3, 32, 32), 16, reconstructs=True),
    "mamba": Network(Mamba, tokens(32), 32),
    "mixture": Network(Mixture, images(32), 128),
    "prototypes": Network(Prototypes, images(1, 28, 28)),
    "point-net": Network(PointNet, images(3, 128)),
    "deep-sets": Network(DeepSets, images(50, 3)),
    "lstm-cell": Network(CellByCell, tokens(20), wanted=2.0),
}
