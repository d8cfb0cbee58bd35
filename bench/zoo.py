"""Networks to measure a training step on: the paper's CNNs, and one of every common kind from the shelf.

Inputs are random and nothing is learned: only speed and memory are measured with them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pdpsgd.models.networks import mnist_cnn, svhn_cnn

Build = Callable[[], nn.Module]
VOCABULARY = 1000


@dataclass(frozen=True)
class Network:
    """A network, the inputs it is given, and the batch at which it is usually measured."""

    build: Build
    inputs: Callable[[int], Tensor]
    batch: int = 64
    classes: int = 10
    wanted: float = 1.5  # a private step over a plain one
    reconstructs: bool = False  # the target is the input, not a class

    def targets(self, inputs: Tensor) -> Tensor:
        """Return targets for these inputs."""
        return inputs if self.reconstructs else torch.randint(self.classes, (len(inputs),))

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss."""
        return F.mse_loss(outputs, targets) if self.reconstructs else F.cross_entropy(outputs, targets)


# Images ------------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """What some layers compute, added to their input (or to a projection of it)."""

    def __init__(self, *layers: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.shortcut = shortcut or nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs) + self.shortcut(inputs)
        return outputs


def resnet20(convolution: type[nn.Conv2d] = nn.Conv2d) -> nn.Module:
    """ResNet-20 for images of 32 x 32, with GroupNorm."""

    def block(before: int, width: int, stride: int) -> nn.Module:
        shortcut = None if before == width else convolution(before, width, 1, stride, bias=False)
        inner = [
            convolution(before, width, 3, stride, 1, bias=False),
            nn.GroupNorm(8, width),
            nn.ReLU(),
            convolution(width, width, 3, 1, 1, bias=False),
            nn.GroupNorm(8, width),
        ]
        return nn.Sequential(Residual(*inner, shortcut=shortcut), nn.ReLU())

    widths = [(16, 16, 1), (16, 32, 2), (32, 64, 2)]
    layers: list[nn.Module] = [convolution(3, 16, 3, 1, 1, bias=False), nn.GroupNorm(8, 16), nn.ReLU()]
    for before, width, stride in widths:
        layers += [block(before, width, stride), block(width, width, 1), block(width, width, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class StandardizedConv2d(nn.Conv2d):
    """A convolution whose kernels are standardized (Qiao et al. 2019)."""

    def forward(self, input: Tensor) -> Tensor:
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        weight = (self.weight - mean) / (self.weight.std((1, 2, 3), keepdim=True) + 1e-5)
        return self._conv_forward(input, weight, self.bias)


def weight_standardized() -> nn.Module:
    """Three weight-standardized convolutions with GroupNorm."""
    layers: list[nn.Module] = []
    for before, width in ((3, 16), (16, 32), (32, 64)):
        layers += [
            StandardizedConv2d(before, width, 3, padding=1),
            nn.GroupNorm(8, width),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10))


def mobilenet() -> nn.Module:
    """Inverted residuals with depthwise convolutions and GroupNorm (as MobileNetV2's)."""

    def block(before: int, width: int, stride: int, expansion: int = 4) -> nn.Module:
        inner = before * expansion
        layers = [
            nn.Conv2d(before, inner, 1, bias=False),
            nn.GroupNorm(8, inner),
            nn.ReLU6(),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False),
            nn.GroupNorm(8, inner),
            nn.ReLU6(),
            nn.Conv2d(inner, width, 1, bias=False),
            nn.GroupNorm(8, width),
        ]
        return Residual(*layers) if stride == 1 and before == width else nn.Sequential(*layers)

    blocks = [block(16, 24, 2), block(24, 24, 1), block(24, 32, 2), block(32, 32, 1), block(32, 64, 2)]
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.GroupNorm(8, 16), nn.ReLU6()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of images."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ToLast(nn.Module):
    """Channels last, or back to where they were."""

    def __init__(self, *order: int) -> None:
        super().__init__()
        self.order = order

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.permute(self.order)


def convnext() -> nn.Module:
    """ConvNeXt blocks: 7 x 7 depthwise, LayerNorm, and two linear layers over the channels."""

    def block(width: int) -> nn.Module:
        return Residual(
            nn.Conv2d(width, width, 7, padding=3, groups=width),
            ToLast(0, 2, 3, 1),
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            ToLast(0, 3, 1, 2),
        )

    stages: list[nn.Module] = [nn.Conv2d(3, 32, 4, 4)]
    for before, width in ((32, 32), (32, 64), (64, 128)):
        if before != width:
            stages += [
                ToLast(0, 2, 3, 1),
                nn.LayerNorm(before),
                ToLast(0, 3, 1, 2),
                nn.Conv2d(before, width, 2, 2),
            ]
        stages += [block(width), block(width)]
    return nn.Sequential(
        *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(128), nn.Linear(128, 10)
    )


class VisionTransformer(nn.Module):
    """A ViT on patches of 4 x 4 of images of 32 x 32: 6 layers of width 192 on nn.TransformerEncoder."""

    def __init__(self, width: int = 192, heads: int = 3, depth: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.positions = nn.Embedding(64, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.out = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        # One row of positions per example, because Opacus needs it.
        places = torch.arange(64).expand(len(images), -1)
        logits: Tensor = self.out(self.encoder(patches + self.positions(places)).mean(1))
        return logits


class UNet(nn.Module):
    """Down twice, up twice by transposed convolutions, with the maps on the way down joined in."""

    def __init__(self) -> None:
        super().__init__()

        def two(before: int, width: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(before, width, 3, padding=1),
                nn.GroupNorm(4, width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1),
                nn.ReLU(),
            )

        self.down = nn.ModuleList([two(3, 16), two(16, 32)])
        self.bottom = two(32, 64)
        self.up = nn.ModuleList([nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)])
        self.joined = nn.ModuleList([two(64, 32), two(32, 16)])
        self.out = nn.Conv2d(16, 3, 1)

    def forward(self, images: Tensor) -> Tensor:
        first = self.down[0](images)
        second = self.down[1](F.max_pool2d(first, 2))
        x = self.bottom(F.max_pool2d(second, 2))
        for up, joined, skipped in zip(self.up, self.joined, (second, first), strict=True):
            x = joined(torch.cat([up(x), skipped], 1))
        outputs: Tensor = self.out(x)
        return outputs


def decoder() -> nn.Module:
    """An encoder by convolutions and a decoder by transposed ones."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 4, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 4, 2, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 1, 4, 2, 1),
        nn.Sigmoid(),
    )


def video_cnn() -> nn.Module:
    """Two 3-D convolutions."""
    return nn.Sequential(
        nn.Conv3d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool3d(2),
        nn.Conv3d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool3d(2),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


# Tables ------------------------------------------------------------------------------------------------------------


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    """Linear layers with an activation in between."""
    layers: list[nn.Module] = []
    for before, width in itertools.pairwise(widths):
        layers += [nn.Linear(before, width), activation()]
    return nn.Sequential(*layers[:-1])


class EmbeddingBagTable(nn.Module):
    """A bag of 20 out of 10,000 categories, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(10_000, 32, mode="mean")
        self.rest = mlp(32, 64, 10)

    def forward(self, categories: Tensor) -> Tensor:
        logits: Tensor = self.rest(self.bag(categories))
        return logits


class EmbeddedTable(nn.Module):
    """An embedding for each of ten columns of 100 categories, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.ModuleList(nn.Embedding(100, 8) for _ in range(10))
        self.rest = mlp(80, 128, 64, 10)

    def forward(self, categories: Tensor) -> Tensor:
        parts = [column(categories[:, index]) for index, column in enumerate(self.columns)]
        logits: Tensor = self.rest(torch.cat(parts, 1))
        return logits


# Sequences ---------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Embedded tokens, a recurrent layer, and a linear one on its last output."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 64)
        self.layers = kind(64, 64, batch_first=True, **options)
        self.out = nn.Linear(64 * (2 if self.layers.bidirectional else 1), 10)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs, _ = self.layers(self.tokens(tokens))
        logits: Tensor = self.out(outputs[:, -1])
        return logits


class Transformer(nn.Module):
    """Two layers of width 64 on 32 tokens of a vocabulary of 1,000."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, 64), nn.Embedding(32, 64)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.out = nn.Linear(64, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        # One row of positions per example, because Opacus needs it.
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]).expand_as(tokens))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.out(x.mean(1))
        return logits


class PlainAttention(nn.Module):
    """Self-attention written in linear layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.queries, self.keys, self.values, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        batch, time, width = inputs.shape
        parts = [part(inputs) for part in (self.queries, self.keys, self.values)]
        queries, keys, values = (part.view(batch, time, self.heads, -1).transpose(1, 2) for part in parts)
        scores = torch.softmax(queries @ keys.transpose(2, 3) / math.sqrt(width / self.heads), -1)
        outputs: Tensor = self.out((scores @ values).transpose(1, 2).reshape(batch, time, width))
        return outputs


def plain_encoder(width: int = 128) -> nn.Module:
    """Two layers of a transformer, written in plain layers."""

    class Mean(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs.mean(1)

    layers: list[nn.Module] = [nn.Embedding(VOCABULARY, width)]
    for _ in range(2):
        layers += [
            Residual(nn.LayerNorm(width), PlainAttention(width, 4)),
            Residual(
                nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            ),
        ]
    return nn.Sequential(*layers, Mean(), nn.Linear(width, 10))


class TextCNN(nn.Module):
    """Convolutions of three widths over embedded tokens, and the maximum over time (Kim 2014)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 64)
        self.convolutions = nn.ModuleList(nn.Conv1d(64, 64, width) for width in (3, 4, 5))
        self.out = nn.Linear(192, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.tokens(tokens).transpose(1, 2)
        maxima = [F.relu(convolution(embedded)).amax(2) for convolution in self.convolutions]
        logits: Tensor = self.out(torch.cat(maxima, 1))
        return logits


def signal_cnn() -> nn.Module:
    """Three 1-D convolutions on a signal of 256."""
    layers: list[nn.Module] = []
    for before, width in ((4, 32), (32, 64), (64, 64)):
        layers += [nn.Conv1d(before, width, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(256, 10))


def tcn() -> nn.Module:
    """A temporal convolutional network: dilated, residual."""

    def block(before: int, width: int, dilation: int) -> nn.Module:
        return Residual(
            nn.Conv1d(before, width, 3, padding=dilation, dilation=dilation),
            nn.ReLU(),
            nn.Conv1d(width, width, 3, padding=dilation, dilation=dilation),
            nn.ReLU(),
            shortcut=None if before == width else nn.Conv1d(before, width, 1),
        )

    blocks = [block(4, 32, 1), block(32, 32, 2), block(32, 32, 4), block(32, 32, 8)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 10))


# More of what there is -----------------------------------------------------------------------------------------------


class WindowAttention(nn.Module):
    """Attention within windows of 4 x 4, with a table of relative positions (as Swin's)."""

    def __init__(self, width: int, heads: int, window: int = 4) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.norm, self.mixed, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.bias = nn.Parameter(torch.zeros(heads, window**2, window**2))

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        w = self.window
        parts = self.norm(x).view(batch, height // w, w, width // w, w, channels).transpose(2, 3)
        mixed = self.mixed(parts.reshape(batch, -1, w * w, channels))
        queries, keys, values = mixed.unflatten(-1, (3, self.heads, -1)).permute(3, 0, 1, 4, 2, 5)
        scores = queries @ keys.transpose(-1, -2) / math.sqrt(queries.shape[-1]) + self.bias
        seen = (scores.softmax(-1) @ values).transpose(2, 3).flatten(3)
        back = self.out(seen).view(batch, height // w, width // w, w, w, channels).transpose(2, 3)
        return x + back.reshape(x.shape)


def swin(width: int = 64) -> nn.Module:
    """Two blocks of attention within windows, on patches of 2 x 2 of images of 32 x 32."""

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean((1, 2))

    layers: list[nn.Module] = [nn.Conv2d(3, width, 2, 2), ToLast(0, 2, 3, 1)]
    for _ in range(2):
        inner = [nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)]
        layers += [WindowAttention(width, 4), Residual(*inner)]
    return nn.Sequential(*layers, nn.LayerNorm(width), Mean(), nn.Linear(width, 10))


class SqueezeExcite(nn.Module):
    """Channels weighted by what two pointwise convolutions make of their means."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weigh = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(width, width // 4, 1),
            nn.SiLU(),
            nn.Conv2d(width // 4, width, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        weighed: Tensor = x * self.weigh(x)
        return weighed


def efficientnet() -> nn.Module:
    """Inverted residuals with squeeze and excitation, and GroupNorm (as EfficientNet's)."""

    def block(before: int, width: int, stride: int, kernel: int) -> nn.Module:
        inner = before * 4
        layers = [
            nn.Conv2d(before, inner, 1, bias=False),
            nn.GroupNorm(8, inner),
            nn.SiLU(),
            nn.Conv2d(inner, inner, kernel, stride, kernel // 2, groups=inner, bias=False),
            nn.GroupNorm(8, inner),
            nn.SiLU(),
            SqueezeExcite(inner),
            nn.Conv2d(inner, width, 1, bias=False),
            nn.GroupNorm(8, width),
        ]
        return Residual(*layers) if stride == 1 and before == width else nn.Sequential(*layers)

    blocks = [block(16, 24, 2, 3), block(24, 24, 1, 3), block(24, 40, 2, 5), block(40, 40, 1, 5)]
    stem = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.GroupNorm(8, 16), nn.SiLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 10))


class Seq2Seq(nn.Module):
    """A GRU that reads tokens, and one that starts from its state, with attention to what was read."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.joined, self.out = nn.Linear(2 * width, width), nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        read, state = self.encoder(self.tokens(tokens))
        written, _ = self.decoder(self.tokens(tokens.flip(1)), state)
        seen = torch.softmax(written @ read.transpose(1, 2), -1) @ read
        joined = torch.tanh(self.joined(torch.cat([written, seen], -1)))
        logits: Tensor = self.out(joined.mean(1))
        return logits


class Recommender(nn.Module):
    """Numbers through an MLP, eight bags of categories, their inner products, and an MLP on top (as DLRM's)."""

    def __init__(self, tables: int = 8, width: int = 16) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(1000, width, mode="sum") for _ in range(tables))
        self.bottom = mlp(13, 64, width)
        pairs = (tables + 1) * tables // 2
        self.top = mlp(width + pairs, 64, 32, 10)
        self.pairs = torch.triu_indices(tables + 1, tables + 1, 1)

    def forward(self, categories: Tensor) -> Tensor:
        numbers = torch.log1p(categories[:, :13].to(torch.float32)) / 8
        dense = self.bottom(numbers)
        parts = [bag(categories[:, 4 * index : 4 * index + 4]) for index, bag in enumerate(self.bags)]
        every = torch.stack([dense, *parts], 1)
        products = (every @ every.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        logits: Tensor = self.top(torch.cat([dense, products], 1))
        return logits


class GraphNetwork(nn.Module):
    """Two graph convolutions and their mean: each example is a graph of 20 nodes, its edges beside the features."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(16, width), nn.Linear(width, width), nn.Linear(width, 10)

    def forward(self, graphs: Tensor) -> Tensor:
        features, scores = graphs[..., :16], graphs[..., 16:]
        edges = torch.softmax(scores, -1)
        hidden = torch.relu(self.one(edges @ features))
        logits: Tensor = self.out(torch.relu(self.two(edges @ hidden)).mean(1))
        return logits


class Perceiver(nn.Module):
    """Eight learned queries that attend to 128 inputs, and then to themselves."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(8, width) * 0.02)
        self.inputs = nn.Linear(4, width)
        self.cross = nn.MultiheadAttention(width, 4, batch_first=True)
        self.block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.out = nn.Linear(width, 10)

    def forward(self, signals: Tensor) -> Tensor:
        given = self.inputs(signals.transpose(1, 2))
        queries = self.queries.expand(len(given), -1, -1)
        seen, _ = self.cross(queries, given, given, need_weights=False)
        logits: Tensor = self.out(self.block(seen).mean(1))
        return logits


class MixerBlock(nn.Module):
    """An MLP over patches, then one over channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens, self.channels = (
            mlp(patches, 64, patches, activation=nn.GELU),
            mlp(width, 256, width, activation=nn.GELU),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.before(x).transpose(1, 2)).transpose(1, 2)
        mixed: Tensor = x + self.channels(self.after(x))
        return mixed


def mixer(width: int = 64) -> nn.Module:
    """An MLP-Mixer on patches of 4 x 4 of images of 32 x 32."""

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(1)

    patches = [nn.Conv2d(3, width, 4, 4), nn.Flatten(2), ToLast(0, 2, 1)]
    return nn.Sequential(*patches, MixerBlock(64, width), MixerBlock(64, width), Mean(), nn.Linear(width, 10))


def resnext() -> nn.Module:
    """Residual blocks with convolutions in groups of eight, and GroupNorm."""

    def block(width: int) -> nn.Module:
        layers = [
            nn.Conv2d(width, width, 1, bias=False),
            nn.GroupNorm(8, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, groups=8, bias=False),
            nn.GroupNorm(8, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 1, bias=False),
            nn.GroupNorm(8, width),
        ]
        return nn.Sequential(Residual(*layers), nn.ReLU())

    down = nn.Conv2d(64, 128, 3, 2, 1, bias=False)
    blocks = [nn.Conv2d(3, 64, 3, 2, 1, bias=False), block(64), block(64), down, block(128), block(128)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


# Hugging Face ------------------------------------------------------------------------------------------------------


class Logits(nn.Module):
    """A model of Hugging Face's transformers that is given token ids and gives logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=tokens).logits
        return logits


def bert(layers: int = 4, width: int = 128) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        intermediate_size=4 * width,
        max_position_embeddings=64,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return Logits(BertForSequenceClassification(config))


def lora() -> nn.Module:
    """Adapters of rank 8 on an encoder of MiniLM's size (6 layers of width 384)."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        r=8, lora_alpha=16, target_modules=["query", "value"], task_type="SEQ_CLS", lora_dropout=0.0
    )
    return Logits(get_peft_model(bert(6, 384).model, settings))


def distilbert() -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(
        vocab_size=VOCABULARY,
        dim=128,
        n_layers=3,
        n_heads=4,
        hidden_dim=512,
        max_position_embeddings=64,
        num_labels=10,
        dropout=0.0,
        attention_dropout=0.0,
        seq_classif_dropout=0.0,
    )
    return Logits(DistilBertForSequenceClassification(config))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=128,
        n_layer=3,
        n_head=4,
        n_positions=64,
        num_labels=10,
        pad_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return Logits(GPT2ForSequenceClassification(config))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        num_labels=10,
        pad_token_id=0,
    )
    return Logits(LlamaForSequenceClassification(config))


def images(*shape: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, *shape)


def tokens(length: int, below: int = VOCABULARY) -> Callable[[int], Tensor]:
    return lambda batch: torch.randint(1, below, (batch, length))


ZOO: dict[str, Network] = {
    "mnist": Network(mnist_cnn, images(1, 28, 28), wanted=1.25),
    "svhn": Network(svhn_cnn, images(3, 32, 32), wanted=1.25),
    "transformer": Network(Transformer, tokens(32)),
    "mlp": Network(lambda: mlp(100, 256, 256, 2), images(100), 256, 2, 1.25),
    "resnet20": Network(resnet20, images(3, 32, 32), wanted=1.25),
    "bert": Network(bert, tokens(32), 32, wanted=1.25),
    "lora": Network(lora, tokens(32), 32, wanted=1.25),
    "vit": Network(VisionTransformer, images(3, 32, 32), 32, wanted=1.25),
    "embedding-bag": Network(EmbeddingBagTable, tokens(20, 10_000), 256, wanted=1.25),
    "lstm": Network(lambda: Recurrent(nn.LSTM), tokens(20), wanted=2.0),
    "gru": Network(lambda: Recurrent(nn.GRU), tokens(20), wanted=2.0),
    "rnn": Network(lambda: Recurrent(nn.RNN), tokens(20), wanted=2.0),
    "bilstm": Network(lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True), tokens(20), wanted=2.0),
    "embeddings": Network(EmbeddedTable, tokens(10, 100), 256),
    "autoencoder": Network(lambda: mlp(784, 256, 32, 256, 784), images(784), 128, reconstructs=True),
    "deep-mlp": Network(lambda: mlp(32, *[32] * 20, 10), images(32)),
    "decoder": Network(decoder, images(1, 28, 28), reconstructs=True),
    "mobilenet": Network(mobilenet, images(3, 32, 32)),
    "convnext": Network(convnext, images(3, 32, 32), 32),
    "weight-standardized": Network(weight_standardized, images(3, 32, 32)),
    "unet": Network(UNet, images(3, 32, 32), 16, reconstructs=True),
    "encoder": Network(plain_encoder, tokens(32), 32),
    "text-cnn": Network(TextCNN, tokens(40)),
    "signal-cnn": Network(signal_cnn, images(4, 256)),
    "conv3d": Network(video_cnn, images(1, 16, 16, 16), 32),
    "tcn": Network(tcn, images(4, 128)),
    "llama": Network(llama, tokens(32), 16),
    "gpt2": Network(gpt2, tokens(32), 32),
    "distilbert": Network(distilbert, tokens(32), 32),
    "swin": Network(swin, images(3, 32, 32), 32),
    "efficientnet": Network(efficientnet, images(3, 32, 32)),
    "seq2seq": Network(Seq2Seq, tokens(20), wanted=2.0),
    "recommender": Network(Recommender, tokens(32), 256),
    "graph": Network(GraphNetwork, images(20, 36)),
    "perceiver": Network(Perceiver, images(4, 128), 32),
    "mixer": Network(mixer, images(3, 32, 32), 32),
    "resnext": Network(resnext, images(3, 32, 32)),
}
