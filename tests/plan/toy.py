"""Names of a toy Llama's modules, and a plan for it."""

LAYERS = 2

_IN_A_LAYER = (
    "",
    "input_layernorm",
    "self_attn",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def llama_modules(layers: int = LAYERS) -> list[str]:
    inside = [f"model.layers.{layer}.{name}".rstrip(".") for layer in range(layers) for name in _IN_A_LAYER]
    return ["", "model", "model.embed_tokens", "model.layers", *inside, "model.norm", "model.rotary_emb", "lm_head"]


TOY_PLAN = """\
version: 1
name: toy
modules:
  model.embed_tokens: vocab
  model.layers.*.self_attn.{q,k,v}_proj: colwise
  model.layers.*.self_attn.o_proj: rowwise
  model.layers.*.mlp.{gate,up}_proj: colwise
  model.layers.*.mlp.down_proj: rowwise
  lm_head: {style: colwise, output: replicate}
kernels:
  rms_norm: auto
  model.layers.*.mlp: {swiglu: torch}
"""
