"""Small networks of the families that public scripts train; each knows what its input looks like."""

from __future__ import annotations

import torch
from torch import nn


class Perceptron(nn.Module):
    """Linear layers: an actor, a critic, a value function."""

    def __init__(self, inputs: int = 5, outputs: int = 3, hidden: int = 8) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inputs, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.fc3 = nn.Linear(hidden, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc3(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))

    def example(self) -> tuple[torch.Tensor, ...]:
        return (torch.randn(4, self.fc1.in_features),)


class Block(nn.Module):
    """A transformer's block with one fused projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)})
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 2 * width), "c_proj": nn.Linear(2 * width, width)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.attn["c_attn"](self.ln_1(x)).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attn["c_proj"](mixed)
        return x + self.mlp["c_proj"](nn.functional.gelu(self.mlp["c_fc"](self.ln_2(x))))


class Language(nn.Module):
    """A language model with a causal mask as buffer, and its head tied to the embedding if asked."""

    def __init__(self, width: int = 8, vocabulary: int = 17, layers: int = 2, *, tied: bool = False) -> None:
        super().__init__()
        parts = {"wte": nn.Embedding(vocabulary, width), "wpe": nn.Embedding(6, width)}
        blocks = {"h": nn.ModuleList(Block(width) for _ in range(layers)), "ln_f": nn.LayerNorm(width)}
        self.transformer = nn.ModuleDict(parts | blocks)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.transformer["wte"].weight
        self.register_buffer("bias", torch.ones(6, 6).tril().bool())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.transformer["wte"](tokens) + self.transformer["wpe"](torch.arange(tokens.shape[1]))
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))

    def example(self) -> tuple[torch.Tensor, ...]:
        return (torch.randint(self.lm_head.out_features, (2, 6)),)


class Classifier(nn.Module):
    """A small residual classifier of images with batch norms."""

    def __init__(self, classes: int = 4, width: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
        self.fc = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        return self.fc(torch.relu(x + self.layer1(x)).mean((2, 3)))

    def example(self) -> tuple[torch.Tensor, ...]:
        return (torch.randn(2, 3, 6, 6),)


class Patches(nn.Module):
    """A vision transformer: a class token, positions, blocks."""

    def __init__(self, width: int = 8, outputs: int = 6) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, width) * 0.02)
        self.patch_embed = nn.Conv2d(3, width, 3, 3)
        self.blocks = nn.ModuleList([Block(width)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), patches], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])

    def example(self) -> tuple[torch.Tensor, ...]:
        return (torch.randn(2, 3, 6, 6),)


class Generator(nn.Module):
    """Images from noise, by transposed convolutions and batch norms."""

    def __init__(self, noise: int = 4, width: int = 6) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(noise, width, 4, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.main(noise)

    def example(self) -> tuple[torch.Tensor, ...]:
        return (torch.randn(2, self.main[0].in_channels, 1, 1),)


class Discriminator(nn.Module):
    """A score of an image."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2), nn.Conv2d(width, 1, 4, bias=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.main(x)

    def example(self) -> tuple[torch.Tensor, ...]:
        return (torch.randn(2, 3, 8, 8),)


class Denoiser(nn.Module):
    """A network of a diffusion model: convolutions, a time embedding."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.time_mlp = nn.Sequential(nn.Linear(2, width), nn.SiLU(), nn.Linear(width, width))
        self.init_conv = nn.Conv2d(3, width, 3, padding=1)
        self.downs = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(2, width)])
        self.final_conv = nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        x = self.init_conv(x) + self.time_mlp(time)[:, :, None, None]
        for layer in self.downs:
            x = layer(x)
        return self.final_conv(torch.nn.functional.silu(x))

    def example(self) -> tuple[torch.Tensor, ...]:
        return (torch.randn(2, 3, 6, 6), torch.rand(2, 2))


class Diffusion(nn.Module):
    """A denoiser with the buffers of its noise schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Denoiser()
        betas = torch.linspace(1e-4, 0.02, 10)
        self.register_buffer("betas", betas)
        self.register_buffer("alphas_cumprod", (1 - betas).cumprod(0))

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return self.model(x * self.alphas_cumprod[3], time)

    def example(self) -> tuple[torch.Tensor, ...]:
        return self.model.example()


class Recurrent(nn.Module):
    """A recognizer of sequences: a convolution, an LSTM, a projection."""

    def __init__(self, features: int = 5, width: int = 6, outputs: int = 7) -> None:
        super().__init__()
        self.conv = nn.Conv1d(features, width, 3, padding=1)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.output = nn.Linear(width, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(self.lstm(self.conv(x).transpose(1, 2))[0])

    def example(self) -> tuple[torch.Tensor, ...]:
        return (torch.randn(2, self.conv.in_channels, 9),)


class Translation(nn.Module):
    """An encoder and a decoder of one width, whose generator is a module of its own."""

    def __init__(self, width: int = 6, vocabulary: int = 11) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"embeddings": nn.Embedding(vocabulary, width), "rnn": nn.GRU(width, width)})
        self.decoder = nn.ModuleDict({"embeddings": nn.Embedding(vocabulary, width), "rnn": nn.GRU(width, width)})
        self.generator = nn.Sequential(nn.Linear(width, vocabulary), nn.LogSoftmax(-1))

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        _, state = self.encoder["rnn"](self.encoder["embeddings"](source))
        out, _ = self.decoder["rnn"](self.decoder["embeddings"](target), state)
        return self.generator(out)

    def example(self) -> tuple[torch.Tensor, ...]:
        return torch.randint(11, (5, 2)), torch.randint(11, (4, 2))


class Splats(nn.Module):
    """A scene of Gaussians: flat parameters whose first dimension is their number."""

    def __init__(self, number: int = 9) -> None:
        super().__init__()
        self.splats = nn.ParameterDict(
            {
                "means": nn.Parameter(torch.randn(number, 3)),
                "scales": nn.Parameter(torch.randn(number, 3)),
                "quats": nn.Parameter(torch.randn(number, 4)),
                "opacities": nn.Parameter(torch.randn(number)),
                "sh0": nn.Parameter(torch.randn(number, 1, 3)),
                "shN": nn.Parameter(torch.randn(number, 3, 3)),
            }
        )

    def forward(self) -> torch.Tensor:
        return torch.cat([one.flatten() for one in self.splats.values()])

    def example(self) -> tuple[torch.Tensor, ...]:
        return ()
