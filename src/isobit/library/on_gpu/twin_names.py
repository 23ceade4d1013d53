"""Which wrong Triton kernel stands for which planted subject: planted subject -> its twin.

A planted subject that is not listed runs the operator, and so its Triton executor, or is a control.
"""

from __future__ import annotations

LIBRARY = "isobit.library"
ROWS, ELEMENTS, PRODUCTS = (
    f"{LIBRARY}.on_gpu.wrong_{name}" for name in ("rows", "elements", "products")
)


def twins(of: str, by: str, **names: str) -> dict[str, str]:
    """Return {"of:planted": "by:twin"}."""
    return {f"{LIBRARY}.{of}:{name}": f"{by}:{twin}" for name, twin in names.items()}


# By contract, where two contracts plant the same subject.
BY_CONTRACT: dict[str, dict[str, str]] = {
    contract: {
        f"{LIBRARY}.norms.planted:{name}": f"{ROWS}:{prefix}_{twin}"
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
        "rms_norm.claims",
        ROWS,
        eps_outside="rms_eps_outside",
        over_the_batch="rms_over_the_batch",
        bf16_accumulator="rms_bf16_accumulator",
        without_the_last="rms_without_the_last",
    ),
    **twins(
        "layer_norm.claims",
        ROWS,
        eps_outside="layer_eps_outside",
        over_the_batch="layer_over_the_batch",
        unbiased="layer_unbiased",
        one_pass="layer_one_pass",
    ),
    **twins(
        "softmax.claims",
        ROWS,
        without_shift="softmax_without_shift",
        over_the_batch="softmax_over_the_batch",
        without_the_last="softmax_without_the_last",
        wiggling="softmax_wiggling",
    ),
    **twins(
        "log_softmax.planted",
        ROWS,
        over_the_batch="log_over_the_batch",
        not_rescaled="log_not_rescaled",
        without_the_tail="log_without_the_tail",
        log_of_softmax="log_of_softmax",
        plain_gradient="log_plain_gradient",
        wiggling="log_wiggling",
    ),
    **twins(
        "elementwise.planted",
        ELEMENTS,
        by_libm="silu_rounded_twice",
        silu_rounded_between="silu_rounded_between",
        silu_too_steep="silu_too_steep",
        gelu_rounded_between="gelu_rounded_between",
        by_error_function="gelu_rounded_twice",
        gelu_by_difference="gelu_by_difference",
    ),
    **twins(
        "rotary.claims",
        ELEMENTS,
        wrong_in_one_half="rotary_wrong_in_one_half",
        rounded_between="rotary_rounded_between",
    ),
    **twins(
        "embedding.planted",
        ELEMENTS,
        plain_index_add="embedding_padding_counted",
        one_chain="embedding_one_chain",
        duplicates_dropped="embedding_duplicates_dropped",
        bf16_sums="embedding_bf16_sums",
        negative_zeros="embedding_negative_zeros",
        off_by_one="embedding_off_by_one",
    ),
    **twins(
        "exact_sum.claims",
        ELEMENTS,
        in_fp64="exact_truncated",
        rounded_twice="exact_in_digits_of_one_program",
    ),
    **twins(
        "adamw.planted",
        ELEMENTS,
        fused_products="adamw_fused_products",
        approximate_root="adamw_approximate_root",
        corrected_inside="adamw_corrected_inside",
        divided_first="adamw_divided_first",
        rounded_between="adamw_rounded_between",
        eps_inside="adamw_eps_inside",
        coupled="adamw_coupled",
    ),
    **twins("linear.planted", PRODUCTS, bf16_merges="linear_bf16_segments"),
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
    ),
}
