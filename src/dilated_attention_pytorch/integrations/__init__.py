"""Patterns inside models that were written for other attention: `huggingface` for transformers, `pytorch` for torch.nn,
`torchscale` for the LongNet of its authors.

Nothing here is imported with the package; `huggingface` needs transformers.
"""
