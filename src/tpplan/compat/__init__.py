"""torch's private names, all of them, behind one seam.

Everything that tpplan needs from torch beyond its public interface is imported here and given a small,
typed function. Checked on the torch versions that pyproject.toml admits.
"""
