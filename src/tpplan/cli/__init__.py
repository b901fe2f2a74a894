"""The `tpplan` command. Neither its help nor a plan-only `validate` imports torch."""
