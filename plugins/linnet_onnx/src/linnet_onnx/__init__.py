"""ONNX for Linnet: graphs written from the program, ONNX Runtime and TensorRT."""
