"""What the processes of a world import; the server that they are forked from does so once."""

from __future__ import annotations

import gc
import importlib

MODULES = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.opt.modeling_opt",
    "tests.models.tiny",
    "tpplan.api",
)

for name in MODULES:
    importlib.import_module(name)
gc.collect()
gc.freeze()  # no process that is forked from here looks at it again, or copies its pages to do so
