"""Writes ``torch_block.mlirbc`` and ``torch_block.npz``: a PyTorch module as StableHLO.

Run once, with torch 2.13.0 and torchax 0.0.13, in an environment of its own:

    python tests/data/export_torch_block.py

The module is what torchax makes of ``torch.export``; the numbers are what PyTorch itself computes.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent

torch: Any = importlib.import_module("torch")


def tolerate_missing_overloads() -> None:
    """Torchax 0.0.13 lists overloads with named dimensions, which torch 2.13 no longer has."""
    packet = importlib.import_module("torch._ops").OpOverloadPacket
    known = packet.__getattr__

    def lookup(self: Any, name: str) -> Any:
        if ("names" in name or "imname" in name) and name not in self.overloads():
            return getattr(self, self.overloads()[0])
        return known(self, name)

    packet.__getattr__ = lookup


def block() -> Any:
    """Token ids to logits: an embedding, one pre-norm transformer layer, a linear head."""
    nn = torch.nn
    layer = nn.TransformerEncoderLayer(
        32, 4, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.Sequential(nn.Embedding(64, 32), layer, nn.LayerNorm(32), nn.Linear(32, 64)).eval()


def main() -> None:
    """Export the block and compute what it gives."""
    tolerate_missing_overloads()
    convert = importlib.import_module("torchax.export").exported_program_to_stablehlo
    torch.manual_seed(0)
    model = block()
    ids = torch.randint(0, 64, (8, 16))
    with torch.no_grad():
        expected = model(ids).numpy()
        weights, exported = convert(torch.export.export(model, (ids,)))
    arguments = [*map(np.asarray, weights), ids.numpy().astype(np.int32)]
    (HERE / "torch_block.mlirbc").write_bytes(exported.mlir_module_serialized)
    np.savez(
        HERE / "torch_block.npz",
        expected=expected,
        **{f"argument_{i:02}": a for i, a in enumerate(arguments)},
    )


if __name__ == "__main__":
    main()
