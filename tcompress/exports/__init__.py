"""Other forms of a finished model: dense weights again (`dense`), ONNX files (`onnx_folder`).

`onnx_graph` says which parts of a model become a file, with which inputs and outputs, and exports
them; `onnx_quantize` makes smaller ones of a file; `onnx_proof` runs each beside PyTorch. Open
`onnx_folder.py` first.
"""
