"""Forecast returns with pytorch-forecasting's Temporal Fusion Transformer. python forecast.py bars.parquet --predict"""

import argparse

import lightning.pytorch as pl
import pandas as pd
from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet


def arguments(given=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("table", help="a parquet of 5 static, 10 known and up to 210 observed variables")
    parser.add_argument("--variables", type=int, default=210, help="how many of the observed ones")
    parser.add_argument("--symbols", type=int, default=8, help="copies of the table, as if of so many symbols")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--predict", action="store_true")
    return parser.parse_args(given)


def windows(args):
    bars = pd.read_parquet(args.table)
    names = [name for name in bars if name not in ("timestamp", "log_return")]
    bars = bars.reset_index(names="time")
    bars = pd.concat([bars.assign(symbol=str(i)) for i in range(args.symbols)], ignore_index=True)
    return TimeSeriesDataSet(
        bars,
        time_idx="time",
        target="log_return",
        group_ids=["symbol"],
        max_encoder_length=50,
        max_prediction_length=10,
        static_reals=names[:5],
        time_varying_known_reals=names[5:15],
        time_varying_unknown_reals=names[15 : 15 + args.variables],
    )


def network(data, args):
    return TemporalFusionTransformer.from_dataset(
        data,
        hidden_size=args.hidden,
        attention_head_size=args.heads,
        dropout=args.dropout,
        loss=QuantileLoss(),
        optimizer="adam",
        learning_rate=1e-3,
    )


def main():
    args = arguments()
    pl.seed_everything(0)
    data = windows(args)
    model = network(data, args)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=1, gradient_clip_val=0.1, enable_checkpointing=False, **quiet)
    trainer.fit(model, data.to_dataloader(train=True, batch_size=args.batch_size))
    if args.predict:
        loader = data.to_dataloader(train=False, batch_size=args.batch_size * 10)
        return model.predict(loader, trainer_kwargs=quiet)


if __name__ == "__main__":
    main()
