"""The Triton kernels: the only folder that imports triton. Takes tensors and numbers, knows no pattern and no layout."""
