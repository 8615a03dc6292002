"""Every Mixture-of-Experts architecture of the pinned transformers: what stands for it in tests, or why nothing does."""

from __future__ import annotations

# Directory below transformers/models → the model type whose tiny checkpoint stands for it.
SERVED: dict[str, str] = {
    **{
        name: name
        for name in (
            "afmoe axk1 axk2 bailing_hybrid beam cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 dots1"
            " ernie4_5_moe exaone_moe flex_olmo flint glm4_moe glm4_moe_lite glm_moe_dsa gpt_oss granitemoe"
            " granitemoe_swa granitemoehybrid granitemoeshared hunyuan_v1_moe hy_v3 hy_v4 jamba kimi_linear kolibri1"
            " laguna lara_mini lfm2_moe mellum mimo_v2_flash minimax minimax_m2 mixtral nemotron_h olmoe phimoe"
            " qwen2_moe qwen3_moe qwen3_next solar_open zaya"
        ).split()
    },
    "aria": "aria_text",
    "dots3_note": "dots3_note_text",
    "gemma4": "gemma4_text",
    "inkling": "inkling_text",
    "inkling2": "inkling2_text",
    "inkling2_loop": "inkling2_loop_text",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen4_exp": "qwen4_exp_text",
}

MATRIX_TYPES = tuple(sorted(SERVED.values()))
