"""Kinds of op by what a compiler can do with them; names are StableHLO's, without the dialect."""

from __future__ import annotations

ELEMENTWISE = frozenset(
    [
        "abs",
        "add",
        "and",
        "atan2",
        "bitcast_convert",
        "cbrt",
        "ceil",
        "clamp",
        "compare",
        "complex",
        "convert",
        "cosine",
        "divide",
        "erf",
        "erf_inv",
        "erfc",
        "exponential",
        "exponential_minus_one",
        "floor",
        "imag",
        "is_finite",
        "is_inf",
        "lgamma",
        "digamma",
        "log",
        "log_plus_one",
        "logistic",
        "maximum",
        "minimum",
        "multiply",
        "negate",
        "not",
        "or",
        "popcnt",
        "power",
        "real",
        "remainder",
        "round_nearest_afz",
        "round_nearest_even",
        "rsqrt",
        "select",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "sign",
        "sine",
        "sinh",
        "sqrt",
        "square",
        "subtract",
        "tan",
        "tanh",
        "xor",
        "asin",
        "acos",
        "atan",
    ]
)
"""Kinds of op whose result has an operand's shape and can take its place in memory."""

MOVES = frozenset(
    [
        "broadcast_in_dim",
        "transpose",
        "slice",
        "dynamic_slice",
        "pad",
        "concatenate",
        "reverse",
        "gather",
    ]
)
"""Kinds of op that only pick or repeat elements."""

EXPENSIVE = frozenset(
    [
        "tanh",
        "exponential",
        "log",
        "sqrt",
        "rsqrt",
        "power",
        "divide",
        "logistic",
        "erf",
        "erf_inv",
        "erfc",
        "gather",
        "exponential_minus_one",
        "log_plus_one",
        "cosine",
        "sine",
        "tan",
        "cbrt",
        "atan2",
        "lgamma",
        "digamma",
    ]
)
"""Kinds that are computed once and kept when several ops read them; others are computed again."""

PRODUCTS = frozenset({"dot_general", "convolution", "ragged_dot"})
"""Kinds of op that a matrix unit runs."""

MATERIAL_KINDS = frozenset({"constant", "iota", "partition_id"})
"""Kinds whose results take no memory that is counted."""

FUSIBLE = ELEMENTWISE | MOVES
