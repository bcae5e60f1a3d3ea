"""DeBERTa-v3-small as a classifier of short texts, with random weights or trained ones.

The network of MAELSTROM's second application (deliverable D3.7, section 4.3): 141,896,450 parameters. The architecture (He et al., arXiv
2111.09543) is that of the ``transformers`` library; its sizes stand here, so that nothing is fetched.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from caraml.workloads import make_torchvision_importable
from caraml.workloads.pretrained import load_weights, read_config

VOCABULARY = 128_100
LABELS = 2
SMALL: dict[str, Any] = {"hidden_size": 768, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 3072}
TINY: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
"""For machines that cannot train the published size; the vocabulary stays."""

_DECIDES = [
    *("vocab_size", "hidden_act", "max_position_embeddings", "type_vocab_size", "layer_norm_eps", "relative_attention", "share_att_key"),
    *("max_relative_positions", "position_buckets", "norm_rel_ebd", "pos_att_type", "position_biased_input"),
]
"""What computes something else with another value."""


def deberta_config(sizes: dict[str, Any]) -> Any:
    """The ``transformers`` configuration of DeBERTa-v3 with these sizes."""
    from transformers import DebertaV2Config

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        **sizes,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "max_position_embeddings": 512,
        "type_vocab_size": 0,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-7,
        "relative_attention": True,
        "max_relative_positions": -1,
        "position_buckets": 256,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "pad_token_id": 0,
        "pooler_dropout": 0.0,
        "pooler_hidden_act": "gelu",
        "pooler_hidden_size": sizes["hidden_size"],
        "cls_dropout": 0.1,
        "num_labels": LABELS,
    }
    return DebertaV2Config(**settings)


class TweetClassifier(torch.nn.Module):
    """Token ids int64 (B, T), 0 where there is no token, to scores (B, 2) of "dry" and "raining"."""

    def __init__(self, sizes: dict[str, int] | None = None) -> None:
        super().__init__()
        make_torchvision_importable()  # transformers imports it, needed or not
        from transformers import DebertaV2ForSequenceClassification

        self.network = DebertaV2ForSequenceClassification(deberta_config(sizes or SMALL))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores before the softmax."""
        return self.network(input_ids=tokens, attention_mask=(tokens != 0).long()).logits


def check_config(folder: Path, sizes: dict[str, Any]) -> None:
    """Raise ``InputError`` for the folder of another network."""
    ours, names = deberta_config(sizes).to_dict(), [*sizes, *_DECIDES]
    read_config(folder, "deberta-v2", {name: ours[name] for name in names}, {"small": SMALL, "tiny": TINY})


def trained(model: TweetClassifier, folder: Path, sizes: dict[str, Any]) -> None:
    """Fill the network with the weights of a folder; its head stays as it was drawn. Raises ``InputError`` for those of another network."""
    check_config(folder, sizes)
    load_weights(model.network, folder, head=("pooler.", "classifier."))
