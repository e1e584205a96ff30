"""Turns checkpoints into bundles of ONNX graphs. Needs neither torch nor ONNX Runtime."""
