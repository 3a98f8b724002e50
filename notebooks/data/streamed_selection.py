"""The variable selection of pytorch-forecasting's TFT, streamed: it never holds the outputs of all variables.

The library computes all outputs, stacks them, multiplies by the weights and sums. The weights depend on the scaled
inputs alone, so the sum can be made chunk by chunk; a checkpoint drops what a chunk computed and makes it again in the
backward pass. Parameters, their names and the function stay what they are. To use it, before the model is called:

    VariableSelectionNetwork.forward = streamed
"""

import torch
from pytorch_forecasting.models.temporal_fusion_transformer.sub_modules import VariableSelectionNetwork
from torch.utils.checkpoint import checkpoint

CHUNK = 8  # variables whose outputs are there at the same time
whole = VariableSelectionNetwork.forward


def streamed(self, x, context=None):
    if self.num_inputs < 2:
        return whole(self, x, context)

    def scaled(name):
        scale = self.prescalers
        return scale[name](x[name]) if name in scale else x[name]

    def part(names, weights):
        networks = self.single_variable_grns
        outputs = (networks[name](scaled(name)) for name in names)
        pairs = zip(outputs, weights.split(1, -1), strict=True)
        return sum(y * weight for y, weight in pairs)

    names = [*self.input_sizes]
    flat = torch.cat([scaled(name) for name in names], dim=-1)
    weights = self.softmax(self.flattened_grn(flat, context))
    chunks = (names[i : i + CHUNK] for i in range(0, len(names), CHUNK))
    parts = zip(chunks, weights.split(CHUNK, -1), strict=True)
    y = sum(checkpoint(part, *each, use_reentrant=False) for each in parts)
    return y, weights.unsqueeze(-2)
