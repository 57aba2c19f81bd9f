"""The canonical form of quantized weights, and quantization of plain weights."""
