"""pytorch-forecasting's Temporal Fusion Transformer on a table of its own making: fit, then predict."""

import argparse

import lightning.pytorch as pl
import numpy as np
import pandas as pd
from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet

parser = argparse.ArgumentParser()
parser.add_argument("--predict", action="store_true")
parser.add_argument("--out", default=None)
args = parser.parse_args()

steps, groups = 60, 3
rng = np.random.default_rng(0)
table = pd.DataFrame(
    {
        "time_idx": np.tile(np.arange(steps), groups),
        "series": np.repeat([f"s{i}" for i in range(groups)], steps),
        "price": rng.normal(size=steps * groups).astype("float32"),
        "value": rng.normal(size=steps * groups).astype("float32").cumsum(),
    }
)
training = TimeSeriesDataSet(
    table[table.time_idx < 50],
    time_idx="time_idx",
    target="value",
    group_ids=["series"],
    max_encoder_length=12,
    max_prediction_length=4,
    static_categoricals=["series"],
    time_varying_known_reals=["time_idx", "price"],
    time_varying_unknown_reals=["value"],
    add_relative_time_idx=True,
)
validation = TimeSeriesDataSet.from_dataset(training, table, predict=True, stop_randomization=True)
train_loader = training.to_dataloader(train=True, batch_size=8, num_workers=0)
val_loader = validation.to_dataloader(train=False, batch_size=8, num_workers=0)

pl.seed_everything(42)
trainer = pl.Trainer(
    max_epochs=1,
    limit_train_batches=3,
    gradient_clip_val=0.1,
    enable_model_summary=True,
    default_root_dir=args.out,
    logger=False,
    enable_checkpointing=False,
)
tft = TemporalFusionTransformer.from_dataset(
    training, learning_rate=0.03, hidden_size=8, attention_head_size=2, dropout=0.1, hidden_continuous_size=4,
    loss=QuantileLoss(), optimizer="adam",
)  # fmt: skip
trainer.fit(tft, train_dataloaders=train_loader, val_dataloaders=val_loader)
if args.predict:
    print(tft.predict(val_loader, trainer_kwargs={"default_root_dir": args.out, "logger": False}).shape)
