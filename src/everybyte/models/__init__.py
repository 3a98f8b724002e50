"""The networks the book studies: plain PyTorch that knows nothing of the tracer."""

from everybyte.models.tft import TFT, TFTConfig, parameters_by_component, quantile_loss

__all__ = ["TFT", "TFTConfig", "parameters_by_component", "quantile_loss"]
