"""The Triton kernels: the only folder that imports triton. Takes tensors and layouts, knows no pattern."""
