"""Attention by tile in a slide encoder of torchscale (Prov-GigaPath's kind), on a CPU, without flash-attn.

    python examples/slide_encoder.py --tiles 2000 --out slide.png

With the packages of Prov-GigaPath the same three lines serve its own model:

    model = gigapath.slide_encoder.create_model("hf_hub:prov-gigapath/prov-gigapath", "gigapath_slide_enc12l768d", 1536)
    replace_dilated_attention(model)
    with attention_maps(model, queries=[0]) as maps:
        model(tile_embeddings, coordinates)

Here the encoder is a small one with the same attention modules and random weights, so the picture shows where the class
token looks in it, and no pathology. The tiles of a slide lie where there is tissue.
"""

import argparse
import math
from types import SimpleNamespace

import torch
from torch import nn

from dilated_attention_pytorch.integrations.torchscale import attention_maps, replace_dilated_attention

SEGMENTS, DILATIONS = [256, 1448, 8192], [1, 2, 4]


class DilatedAttention(nn.Module):
    """What torchscale's looks like from outside."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.args = SimpleNamespace(segment_length=SEGMENTS, dilated_ratio=DILATIONS)
        self.embed_dim, self.num_heads, self.dropout = dim, heads, 0.0
        self.k_proj, self.v_proj, self.q_proj, self.out_proj = (nn.Linear(dim, dim) for _ in range(4))
        self.inner_attn_ln, self.xpos = nn.LayerNorm(dim), None

    def forward(self, query, key, value, **options):  # type: ignore[no-untyped-def]
        raise ImportError("flash_attn is not installed")


class SlideEncoder(nn.Module):
    """Tiles with sine positions behind a class token, through layers of dilated attention."""

    def __init__(self, features: int = 32, dim: int = 64, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.embed, self.class_token = nn.Linear(features, dim), nn.Parameter(torch.randn(1, 1, dim))
        self.layers = nn.ModuleList(DilatedAttention(dim, heads) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers))
        self.register_buffer("wave", torch.exp(-torch.arange(dim // 4) * (8 * math.log(2) / dim)))

    def forward(self, tiles: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        angles = (place[..., None] * self.wave).flatten(2)
        x = self.embed(tiles) + torch.cat((angles.sin(), angles.cos()), dim=-1)
        x = torch.cat((self.class_token.expand(len(x), -1, -1), x), dim=1)
        for attend, norm in zip(self.layers, self.norms, strict=True):
            normed = norm(x)
            x = x + attend(normed, normed, normed)[0]
        return x[:, 0]


def tissue(tiles: int) -> torch.Tensor:
    """(tiles, 2): places of a slide that tissue covers, row by row as they are cut."""
    side = math.ceil(math.sqrt(2 * tiles))
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    ridges = torch.sin(5.0 * x / side) + torch.cos(7.0 * y / side) - ((x - y) / side) ** 2
    chosen = ridges.flatten().topk(tiles).indices.sort().values
    return torch.stack((x.flatten()[chosen], y.flatten()[chosen]), dim=1)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", type=int, default=2000, help="how many tiles the slide has")
    parser.add_argument("--out", default="slide.png", help="the picture")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model, place = SlideEncoder().eval(), tissue(options.tiles)
    replaced = replace_dilated_attention(model)
    with attention_maps(model, queries=[0]) as maps, torch.no_grad():
        model(torch.randn(1, options.tiles, 32), place[None].float())
    by_layer = [found[0].mean(0)[1:] * options.tiles for found in maps.values()]  # times what an even look would give
    print(f"{len(replaced)} attention modules replaced; {options.tiles} tiles and a class token")
    for name, found in zip(maps, by_layer, strict=True):
        top = found.topk(max(1, options.tiles // 100)).values.sum() / found.sum()
        print(f"{name}: the class token gives {100 * top:.1f} % of its attention to 1 % of the tiles")

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(by_layer), figsize=(3.2 * len(by_layer), 3.4), layout="constrained")
    for axis, name, found in zip(axes, maps, by_layer, strict=True):
        points = axis.scatter(*place.T, c=found, s=4, marker="s", cmap="magma", vmin=0, vmax=found.quantile(0.99))
        axis.set(title=name, xticks=[], yticks=[], aspect="equal")
        axis.invert_yaxis()
    figure.colorbar(points, ax=axes, label="attention of the class token\n(1: an even look at all tiles)")
    figure.savefig(options.out, dpi=120)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
