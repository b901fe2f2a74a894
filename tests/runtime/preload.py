# ruff: noqa: F401
"""What the processes of a world import; the server that they are forked from does so once."""

import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import transformers.models.bert.modeling_bert
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama
import transformers.models.opt.modeling_opt

import tests.models.tiny
import tpplan.api
