"""Which wrong Triton kernel stands for which planted subject: planted subject -> its twin; without torch.

A planted subject without a twin is in AROUND or in STOCK, which name the reason. One that is in none fails
tests/gpu/test_contracts_on_backends.py, which also launches those of AROUND.
"""

from __future__ import annotations

LIBRARY = "isobit.library"
ROWS, ELEMENTS, PRODUCTS, WORDS = (
    f"{LIBRARY}.on_gpu.wrong_{name}" for name in ("rows", "elements", "products", "words")
)
OF_WORDS = (
    "over_the_batch",
    "neighbours_target",
    "ignored_counted",
    "without_the_tail",
    "not_rescaled",
    "a_hair_more",
    "bf16_logits",
    "temperature_after",
    "vocabulary_reversed",
    "padding_counted",
    "dhidden_by_rows",
    "ignored_pulled",
    "without_temperature",
    "blunted",
    "tokens_backwards",
)
OF_LOSSES = (
    "over_the_batch",
    "neighbours_target",
    "bf16_logits",
    "ignored_pulled",
    "tokens_backwards",
)
OF_HEADS = (
    "bf16_logits",
    "widened_late",
    "decoding_otherwise",
    "without_the_last_feature",
    "temperature_after",
    "neighbours_target",
    "without_the_tail",
)


def twins(of: str, by: str, **names: str) -> dict[str, str]:
    """Return {"of:planted": "by:twin"}."""
    return {f"{LIBRARY}.{of}:{name}": f"{by}:{twin}" for name, twin in names.items()}


# By contract, where two contracts plant the same subject.
BY_CONTRACT: dict[str, dict[str, str]] = {
    contract: {
        f"{LIBRARY}.norms:{name}": f"{ROWS}:{prefix}_{twin}"
        for name, twin in (
            ("padding_counted", "padding_counted"),
            ("leaves_at_padding", "leaves_at_padding"),
            ("one_chain", "one_chain"),
            ("heads_before_samples", "heads_descending"),
            ("bf16_sums", "bf16_sums"),
        )
    }
    for contract, prefix in (("rmsnorm-kernel-v1", "rms"), ("layernorm-kernel-v1", "layer"))
}

TWINS: dict[str, str] = {
    **twins(
        "rms_norm",
        ROWS,
        eps_outside="rms_eps_outside",
        over_the_batch="rms_over_the_batch",
        bf16_accumulator="rms_bf16_accumulator",
        without_the_last="rms_without_the_last",
        without_eps="rms_without_eps",
        without_a_root="rms_without_a_root",
        by_squares_in_fp16="rms_squares_in_fp16",
    ),
    **twins(
        "layer_norm",
        ROWS,
        eps_outside="layer_eps_outside",
        over_the_batch="layer_over_the_batch",
        unbiased="layer_unbiased",
        one_pass="layer_one_pass",
    ),
    **twins(
        "softmax",
        ROWS,
        without_shift="softmax_without_shift",
        over_the_batch="softmax_over_the_batch",
        without_the_last="softmax_without_the_last",
        wiggling="softmax_wiggling",
    ),
    **twins(
        "log_softmax",
        ROWS,
        over_the_batch="log_over_the_batch",
        not_rescaled="log_not_rescaled",
        without_the_tail="log_without_the_tail",
        log_of_softmax="log_of_softmax",
        plain_gradient="log_plain_gradient",
        wiggling="log_wiggling",
    ),
    **twins(
        "elementwise",
        ELEMENTS,
        by_libm="silu_rounded_twice",
        silu_rounded_between="silu_rounded_between",
        silu_too_steep="silu_too_steep",
        gelu_rounded_between="gelu_rounded_between",
        by_error_function="gelu_rounded_twice",
        gelu_by_difference="gelu_by_difference",
        gelu_of_a_leaky_kind="gelu_of_a_leaky_kind",
        gelu_above_x="gelu_above_x",
        gelu_with_a_step="gelu_with_steps",
        swiglu_by_sigmoid="swiglu_by_sigmoid",
        swiglu_with_a_limit="swiglu_with_a_limit",
    ),
    **twins(
        "rotary",
        ELEMENTS,
        wrong_in_one_half="rotary_wrong_in_one_half",
        rounded_between="rotary_rounded_between",
        frequencies_reversed="rotary_frequencies_reversed",
    ),
    **twins(
        "embedding",
        ELEMENTS,
        plain_index_add="embedding_padding_counted",
        one_chain="embedding_one_chain",
        duplicates_dropped="embedding_duplicates_dropped",
        bf16_sums="embedding_bf16_sums",
        negative_zeros="embedding_negative_zeros",
        off_by_one="embedding_off_by_one",
    ),
    **twins(
        "exact_sum",
        ELEMENTS,
        in_fp64="exact_truncated",
        rounded_twice="exact_in_digits_of_one_program",
    ),
    **twins(
        "adamw",
        ELEMENTS,
        fused_products="adamw_fused_products",
        approximate_root="adamw_approximate_root",
        corrected_inside="adamw_corrected_inside",
        divided_first="adamw_divided_first",
        rounded_between="adamw_rounded_between",
        eps_inside="adamw_eps_inside",
        coupled="adamw_coupled",
    ),
    **twins("grad_norm", ELEMENTS, in_fp32="norm_by_lane"),
    **twins("linear.planted", PRODUCTS, bf16_merges="linear_bf16_segments"),
    **twins(
        "mixture_of_experts",
        ROWS,
        combined_by_slot="experts_by_slot",
        combined_by_one_chain="experts_by_one_chain",
        highest_id="experts_by_highest_id",
    ),
    **twins(
        "causal_conv",
        ROWS,
        leaks_between_samples="convolution_leaks",
        gradient_leaks="convolution_gradient_leaks",
        sums_in_16_bits="convolution_in_16_bits",
    ),
    **twins("delta_rule", ROWS, in_16_bits="delta_in_16_bits"),
    **twins(
        "attention.planted",
        PRODUCTS,
        split_by_count="attention_by_count",
        cut_from_the_chunk="attention_by_count",
        without_rescaling="attention_without_rescaling",
        bf16_accumulator="attention_bf16_accumulator",
        summed_backwards="attention_backwards",
        heads_mixed="attention_heads_mixed",
        sees_the_next="attention_sees_the_next",
        batch_maximum="attention_batch_maximum",
        row_blocks="attention_row_blocks",
    ),
    **twins("logprob.planted", WORDS, **{name: f"word_{name}" for name in OF_WORDS}),
    **twins("distillation.planted", WORDS, torch_form="distilled_by_differences"),
    **twins("cross_entropy", WORDS, **{name: f"loss_{name}" for name in OF_LOSSES}),
    **twins("lm_head", WORDS, **{name: f"head_{name}" for name in OF_HEADS}),
}

# They are wrong in how they call the operator, or in what they make of its result: they run its Triton executor.
AROUND: frozenset[str] = frozenset(
    f"{LIBRARY}.{module}:{name}"
    for module, names in {
        "rms_norm": "offset_forgotten offset_rounded summed_backwards",
        "layer_norm": "summed_backwards without_bias",
        "softmax": "of_zeros",
        "log_softmax": "a_hair_more of_zeros summed_backwards",
        "elementwise": "silu_in_small_batches_by_stock silu_off_by_lane silu_with_other_tail "
        "gelu_in_small_batches_by_stock gelu_off_by_lane gelu_the_other gelu_with_other_tail "
        "swiglu_exchanged swiglu_in_small_batches_by_libm swiglu_off_by_lane swiglu_rounded_between "
        "swiglu_with_other_tail",
        "rotary": "fused_if_alone in_bf16 in_pairs last_head_off narrow_for_narrow of_the_neighbour "
        "with_the_gradient_of_the_turn",
        "embedding": "without_padding_idx",
        "adamw": "by_tails corrected_late normalised_apart",
        "exact_sum": "by_storage halves_rounded mean_gradient skipping_the_small with_one_infinity",
        "grad_norm": "largest_shard norm_of_norms sum_of_norms without_the_last",
        "linear.planted": "axes_swapped axes_swapped_where_square leaf_at_padding sizes_exchanged split_by_rows "
        "tail_reordered",
        "linear_group": "apart blunt by_rows turned ungrouped without_bias without_samples",
        "attention.planted": "a_hair_less bf16_gradients chunks_as_windows chunks_from_the_call one_sided "
        "padding_counted slope_forgotten window_off_by_one without_the_cap without_the_last zero_times_infinity",
        "mixture_of_experts": "balanced_by_batch expert_without_tokens one_sample padded_row_routed stock",
        "causal_conv": "forgets_the_past newest_first_in_long_batches newest_first_when_decoding "
        "one_row_stale one_tap_fewer sums_padding taps_reversed",
        "delta_rule": "chunks_of_the_call crops_beyond_the_chunk decodes_by_the_recurrence "
        "forgets_the_open_chunk gradient_leaks leaks_between_samples stale_open_chunk",
        "gqa": "first_group_for_all heads_descending keys_repeated last_head_counts",
        "distillation.planted": "a_hair_less alpha_exchanged blunt by_count directions_exchanged gradient_in_bf16 "
        "gradient_of_forward gradient_over_temperature ignored_pulled in_bf16 mean_of_means normalised_apart "
        "padding_in_the_mean renormalised_words summed_in_order summed_plainly without_samples without_t_squared",
        "cross_entropy": "blunt mean_of_means padding_in_the_mean summed_in_order summed_plainly",
    }.items()
    for name in names.split()
)
# They are torch's own functions, which a claim must find without help: they run nothing of isobit.
STOCK: frozenset[str] = frozenset(
    f"{LIBRARY}.{module}:{name}"
    for module, names in {
        "stock": "attention exact_sum gelu layer_norm linear log_softmax rms_norm silu swiglu total_norm",
        "adamw": "fused",
        "causal_conv": "stock",
        "delta_rule": "stock",
        "embedding": "stock",
        "linear.planted": "recorded_only",
        "linear_group": "stock",
        "logprob.planted": "stock",
        "distillation.planted": "bf16_log_softmax trl",
        "lm_head": "stock",
        "cross_entropy": "stock",
    }.items()
    for name in names.split()
)
