"""Other forms of a finished model: dense weights again, files for ONNX Runtime and OpenVINO.

`dense` writes the former. `onnx_parts` says which parts of a model become a file, with which inputs
and outputs; `onnx_graph` writes one, `onnx_quantize` makes smaller ones of it, after `onnx_smooth`,
`openvino` converts it; `onnx_proof` runs each beside PyTorch. `runtime_files` finds or makes what
other commands measure. Open `onnx_folder.py` first.
"""
