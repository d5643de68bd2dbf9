"""Other forms of a finished model: dense weights again, files for ONNX Runtime and OpenVINO.

`dense` writes the former. `onnx_parts` says which parts of a model become a file, with which inputs
and outputs; `onnx_graph` writes one, `onnx_quantize` makes smaller ones of it, after `onnx_smooth`;
`onnx_proof` runs each beside PyTorch, `onnx_folder` puts all together, files for OpenVINO too, and
finds or makes what other commands measure. Open `onnx_folder.py` first.
"""
