"""Train a small language model on the characters of a text. python train.py --batch-size 32"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

TEXT = "the quick brown fox jumps over the lazy dog. " * 200


class Characters(Dataset):
    def __init__(self, text, context):
        letters = sorted(set(text))
        self.tokens = torch.tensor([letters.index(letter) for letter in text])
        self.words, self.context = len(letters), context

    def __len__(self):
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, i):
        piece = self.tokens[i * self.context : (i + 1) * self.context + 1]
        return piece[:-1], piece[1:]


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x):
        b, s, h = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, h))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, words, context, width, layers, heads, dropout=0.1):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def evaluate(model, loader, device, amp):
    model.eval()
    total = 0.0
    with torch.no_grad():
        for x, y in loader:
            with torch.autocast(device.type, enabled=amp):
                logits = model(x.to(device))
            total += F.cross_entropy(logits.flatten(0, 1), y.to(device).flatten()).item()
    model.train()
    return total / len(loader)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-4)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    amp = device.type == "cuda"
    data = Characters(TEXT, args.context)
    split = len(data) * 9 // 10
    parts = torch.utils.data.random_split(data, [split, len(data) - split])
    loader = DataLoader(parts[0], args.batch_size, shuffle=True, pin_memory=amp, drop_last=True)
    validation = DataLoader(parts[1], args.batch_size)

    sizes = args.context, args.width, args.layers, args.heads
    model = Model(data.words, *sizes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler(device.type, enabled=amp)
    for epoch in range(args.epochs):
        losses = []
        for x, y in loader:
            x = x.to(device, non_blocking=True)
            y = y.to(device, non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast(device.type, enabled=amp):
                logits = model(x)
                loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        held_out = evaluate(model, validation, device, amp)
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}, held out {held_out:.3f}")


if __name__ == "__main__":
    main()
