"""A training script of the plain kind: options, loaders, mixed precision, an evaluation whose predictions are kept."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Waves(Dataset):
    def __init__(self, n, length):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(n, length, generator=generator)
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Net(nn.Module):
    def __init__(self, length, hidden, classes=2):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(length, hidden),
            nn.LayerNorm(hidden),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, classes),
        )

    def forward(self, x):
        return self.layers(x)


def train(model, loader, optimizer, scaler, device, amp):
    model.train()
    total = 0.0
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        optimizer.zero_grad()
        with torch.autocast(device.type, enabled=amp):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        total += loss.item()
    return total / len(loader)


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    predictions, right = [], 0
    for x, y in loader:
        out = model(x.to(device))
        predictions.append(out)
        right += (out.argmax(1) == y.to(device)).sum().item()
    return torch.cat(predictions), right / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--no-amp", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    amp = not args.no_amp and device.type == "cuda"
    pinned = {"num_workers": args.workers, "pin_memory": torch.cuda.is_available()}
    training = DataLoader(Waves(args.samples, 32), args.batch_size, shuffle=True, **pinned)
    validation = DataLoader(Waves(args.samples // 2, 32), args.batch_size, **pinned)
    model = Net(32, args.hidden).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    scaler = torch.amp.GradScaler(device.type, enabled=amp)
    for epoch in range(args.epochs):
        loss = train(model, training, optimizer, scaler, device, amp)
        predictions, accuracy = evaluate(model, validation, device)
        scheduler.step()
        print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.3f} of {len(predictions)}")


if __name__ == "__main__":
    main()
