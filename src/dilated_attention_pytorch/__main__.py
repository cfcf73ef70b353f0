"""`python -m dilated_attention_pytorch` is `dilated-attention`."""

from .cli import main

if __name__ == "__main__":
    main()
