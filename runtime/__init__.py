"""Runs bundles on ONNX Runtime. Needs onnxruntime, numpy and tokenizers, and nothing else of size."""
