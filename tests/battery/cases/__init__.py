"""All cases; importing a file registers its own."""

from tests.battery.case import CASES
from tests.battery.cases import (
    backward,
    bodies,
    branches,
    changes,
    containers,
    crashes,
    devices,
    key,
    layers,
    rules,
    state,
)

SLOW = frozenset(
    """
    colwise_clamped colwise_halfbias colwise_plusone overrides_by_class_method overrides_by_object
    overrides_on_instance norm_styled_clampedrms norm_styled_flooredrms norm_styled_onemorerms norm_styled_tanhrms
    rowwise_biasminus rowwise_reluin rowwise_residual rowwise_squaredweight rowwise_standardised
    backward_hook_on_root function_saves_size function_straight_through hook_scales retained_gradient vector_jacobian
    allclose_branch asserts_on_split batch_of_one_branch counts_ids equal_branch masked_select_of_split tolist_branch
    adapter_merged_both adds_layer fills_parameters freezes_all mode_and_back repeats_layer
    passes_dict passes_dict_subclass passes_frozen_dataclass passes_named_tuple
    returns_default_dict returns_deque returns_frozen_dataclass returns_generator_list returns_int_keys
    returns_ordered_dict returns_slotted_dataclass returns_twice
    deep_recursion einsum functional_call_of_child rotary_even_complexes rotary_even_halves rotary_even_rotate
    rotary_packed_halves rotary_packed_indexed trapezoid_over_tokens vmap_in_body
    backend_settings data_pointer device_index device_string legacy_type parameter_device tries_numpy
    cast_before empty_batch false_against_zero float_flag heads_in_batch int_then_bool_mask mask_only_later
    odd_length_branch partial_flag repeats requires_grad_branch slice_flag string_flag tuple_against_list
    blocks_that_ask_their_owner bytes_factor counted_blocks flipped_by_size function_lists lambdas layers_by_index
    length_of_row nested_configs numel_factor ones_counted partials size_then_number stride_factor
    batch_norm_cumulative caches_in_globals cache_in_dict counter_of_module loads_state maximum_of_split
    scalar_average_assigned writes_callers_argument
    """.split()
) | {name for name, known in CASES.items() if known.cause == "rules"}
"""Siblings of other cases, and what takes long: left to `-m slow`."""
assert CASES.keys() >= SLOW

__all__ = [
    "CASES",
    "SLOW",
    "backward",
    "bodies",
    "branches",
    "changes",
    "containers",
    "crashes",
    "devices",
    "key",
    "layers",
    "rules",
    "state",
]
