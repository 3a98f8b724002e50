"""Lightning's Trainer, as its documentation begins."""

import argparse

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LitAutoEncoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 48))

    def training_step(self, batch, batch_idx):
        x, _ = batch
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, _ = batch
        self.log("val_loss", nn.functional.mse_loss(self.decoder(self.encoder(x)), x))

    def predict_step(self, batch, batch_idx):
        return self.encoder(batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    L.seed_everything(0)
    data = TensorDataset(torch.randn(32, 48), torch.randint(0, 10, (32,)))
    model = LitAutoEncoder()
    trainer = L.Trainer(
        max_epochs=args.epochs, precision=args.precision, gradient_clip_val=1.0, default_root_dir=args.out
    )
    trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=8))
    if args.predict:
        predictions = trainer.predict(model, DataLoader(data, batch_size=8))
        print(len(predictions), predictions[0].shape)
