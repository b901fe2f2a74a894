"""torch's private names, all of them, behind one seam.

Everything that tpplan needs from torch beyond its public interface is imported here and given a small,
typed function. The last sentence of its docstring says for which versions of torch, of those that pyproject.toml
admits: `For every torch.` if none does this by public names, or `For torch before 2.12.` and `For torch since 2.13.`.
"""
