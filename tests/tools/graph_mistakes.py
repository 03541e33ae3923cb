"""Mistakes in the graphs of a llama.cpp of your own: each must be found by port, on llama.cpp's side, at its op.

    python tests/tools/graph_mistakes.py CHECKOUT         put the mistakes in; then build it (cmake --build CHECKOUT/build)

The mistakes sleep until LLAMADIFF_MISTAKE has their names (with commas between), so that one build has all of them, and
without it is right. They are of the kinds that people made while they added a model.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path("src")
HEADER = SOURCES / "llama-graph.h"
HELPER = """#include <cstdlib>
#include <string>

// Whether a name is in LLAMADIFF_MISTAKE.
static inline bool mistaken(const char * name) {
    const char * all = getenv("LLAMADIFF_MISTAKE");
    return all && ("," + std::string(all) + ",").find("," + std::string(name) + ",") != std::string::npos;
}

"""


@dataclass(frozen=True)
class Mistake:
    """A piece of a graph as it is and as it is wrong, and the checkpoints in which it shows.

    ``place``: how the first thing that is said begins. ``says``: what must be in it, where there is a cause to name.
    """

    name: str
    models: tuple[str, ...]
    file: str
    old: str
    new: str
    place: str
    says: str = ""


GRAPH, MODELS = "llama-graph.cpp", "models/"
QKV = """            auto [Qcur, Kcur, Vcur] = build_qkv(model.layers[il], cur,
                    n_embd_head, n_head, n_head_kv, il);
"""
ROPE_END = "n_rot, rope_type, n_ctx_orig, freq_base, freq_scale,"


def _if(name: str, old: str, new: str, models: str, file: str, place: str, says: str = "") -> Mistake:
    return Mistake(name, tuple(models.split()), file, old, new.replace("BAD", f'mistaken("{name}")'), place, says)


MISTAKES = (
    # norms
    _if("norm-plus-one", "        cur = ggml_mul(ctx0, cur, mw);\n",
        "        cur = BAD ? ggml_add(ctx0, ggml_mul(ctx0, cur, mw), cur) : ggml_mul(ctx0, cur, mw);\n",
        "qwen3 apertus", GRAPH, "ADD"),
    _if("layer-norm", "cur = ggml_rms_norm(ctx0, cur, hparams.f_norm_rms_eps);",
        "cur = BAD ? ggml_norm(ctx0, cur, hparams.f_norm_rms_eps) : ggml_rms_norm(ctx0, cur, hparams.f_norm_rms_eps);",
        "qwen2 smollm3", GRAPH, "NORM"),
    _if("rms-norm", "cur = ggml_norm    (ctx0, cur, hparams.f_norm_eps);",
        "cur = BAD ? ggml_rms_norm(ctx0, cur, hparams.f_norm_eps) : ggml_norm(ctx0, cur, hparams.f_norm_eps);",
        "cohere2 stablelm", GRAPH, "RMS_NORM"),
    _if("epsilon", "        case LLM_NORM_RMS:   cur", "        case LLM_NORM_RMS: if (BAD) { cur = ggml_rms_norm(ctx0, cur, 1e-4f); break; } cur",
        "granite", GRAPH, "RMS_NORM", "epsilon"),
    _if("norm-bias", "    if (mb) {\n        cur = ggml_add(ctx0, cur, mb);", "    if (mb && !BAD) {\n        cur = ggml_add(ctx0, cur, mb);",
        "gpt2 starcoder2", GRAPH, "MUL"),
    _if("no-q-norm", "            Qcur = build_norm(Qcur, model.layers[il].attn_q_norm, NULL, LLM_NORM_RMS, il);\n",
        "            if (!BAD) Qcur = build_norm(Qcur, model.layers[il].attn_q_norm, NULL, LLM_NORM_RMS, il);\n",
        "qwen3", MODELS + "qwen3.cpp", "ROPE Qcur"),
    _if("norm-after-rope", "            cb(Qcur, \"Qcur_pos\", il);\n",
        """            if (BAD) {
                auto again = build_qkv(model.layers[il], cur, n_embd_head, n_head, n_head_kv, il);
                Qcur = ggml_rope_ext(ctx0, again.q, inp_pos, rope_factors, n_rot, rope_type, n_ctx_orig, freq_base, freq_scale,
                                     ext_factor, attn_factor, beta_fast, beta_slow);
                Qcur = build_norm(Qcur, model.layers[il].attn_q_norm, NULL, LLM_NORM_RMS, il);
            }
            cb(Qcur, "Qcur_pos", il);
""", "apertus", MODELS + "apertus.cpp", "ROPE"),
    _if("norm-of-k-for-q", "q = build_norm(q, model.layers[il].attn_q_norm,",
        "q = build_norm(q, BAD ? model.layers[il].attn_k_norm : model.layers[il].attn_q_norm,",
        "lfm2", MODELS + "lfm2.cpp", "MUL"),
    _if("post-norm-after-residual", """        cur = build_norm(cur, model.layers[il].attn_post_norm, NULL, LLM_NORM_RMS, il);
        cb(cur, "post_attn_norm", il);

        // Add the input (residual connection after post-attention norm)
        ggml_tensor * ffn_inp = ggml_add(ctx0, cur, inpSA);
""", """        if (!BAD) cur = build_norm(cur, model.layers[il].attn_post_norm, NULL, LLM_NORM_RMS, il);
        cb(cur, "post_attn_norm", il);

        // Add the input (residual connection after post-attention norm)
        ggml_tensor * ffn_inp = ggml_add(ctx0, cur, inpSA);
        if (BAD) ffn_inp = build_norm(ffn_inp, model.layers[il].attn_post_norm, NULL, LLM_NORM_RMS, il);
""", "glm4", MODELS + "glm4.cpp", ""),
    _if("no-post-norm", "            cur = build_norm(cur, model.layers[il].ffn_post_norm, NULL, LLM_NORM_RMS, il);\n",
        "            if (!BAD) cur = build_norm(cur, model.layers[il].ffn_post_norm, NULL, LLM_NORM_RMS, il);\n",
        "glm4", MODELS + "glm4.cpp", "ADD l_out"),
    _if("no-final-norm", "    cur = build_norm(cur, model.output_norm, NULL, LLM_NORM, -1);\n",
        "    if (!BAD) cur = build_norm(cur, model.output_norm, NULL, LLM_NORM, -1);\n",
        "cohere2", MODELS + "cohere2.cpp", "MUL_MAT"),
    _if("norm-of-another-layer", "                model.layers[il].ffn_norm, NULL,\n                LLM_NORM_RMS, il);\n        cb(cur, \"ffn_norm\", il);\n\n        cur = build_ffn",
        "                model.layers[BAD ? 0 : il].ffn_norm, NULL,\n                LLM_NORM_RMS, il);\n        cb(cur, \"ffn_norm\", il);\n\n        cur = build_ffn",
        "qwen3", MODELS + "qwen3.cpp", "MUL ffn_norm"),
    _if("attn-norm-for-ffn-norm", "            cur = build_norm(ffn_inp, model.layers[il].ffn_norm, nullptr, LLM_NORM_RMS, il);",
        "            cur = build_norm(ffn_inp, BAD ? model.layers[il].attn_norm : model.layers[il].ffn_norm, nullptr, LLM_NORM_RMS, il);",
        "apertus", MODELS + "apertus.cpp", "MUL ffn_norm"),
    # activations, FFN
    _if("gelu-for-silu", "                cur = ggml_swiglu_split(ctx0, cur, tmp);\n                cb(cur, \"ffn_swiglu\", il);",
        "                cur = BAD ? ggml_geglu_split(ctx0, cur, tmp) : ggml_swiglu_split(ctx0, cur, tmp);\n                cb(cur, \"ffn_swiglu\", il);",
        "qwen3 cohere", GRAPH, "GEGLU", ""),
    _if("swiglu-swapped", "                tmp = build_lora_mm_never", "", "", GRAPH, ""),
    _if("no-activation", "            } else {\n                cur = ggml_silu(ctx0, cur);\n                cb(cur, \"ffn_silu\", il);",
        "            } else {\n                cur = ggml_silu(ctx0, cur);\n                cb(cur, \"ffn_silu\", il);", "", GRAPH, ""),
    _if("relu-not-squared", "                cur = ggml_sqr(ctx0, cur);\n                cb(cur, \"ffn_sqr(relu)\", il);",
        "                if (!BAD) cur = ggml_sqr(ctx0, cur);\n                cb(cur, \"ffn_sqr(relu)\", il);",
        "arcee", GRAPH, "MUL_MAT ffn_out"),
    _if("gelu-erf", "                cur = ggml_gelu(ctx0, cur);\n                cb(cur, \"ffn_gelu\", il);\n                if (act",
        "                cur = BAD ? ggml_gelu_erf(ctx0, cur) : ggml_gelu(ctx0, cur);\n                cb(cur, \"ffn_gelu\", il);\n                if (act",
        "gpt2 starcoder2", GRAPH, "GELU_ERF"),
    _if("ffn-bias", "    if (down_b) {\n        cur = ggml_add(ctx0, cur, down_b);", "    if (down_b && !BAD) {\n        cur = ggml_add(ctx0, cur, down_b);",
        "gpt2 starcoder2", GRAPH, "MUL_MAT ffn_"),
    _if("up-for-gate", "                    cur = build_lora_mm(gate, cur);\n                    cb(cur, \"ffn_gate\", il);\n                } break;\n        }",
        "                    cur = build_lora_mm(gate, cur);\n                    cb(cur, \"ffn_gate\", il);\n                } break;\n        }\n        if (BAD) std::swap(cur, tmp);",
        "qwen3 granite", GRAPH, "SWIGLU"),
    _if("xielu-swapped", "ggml_xielu(ctx0, up, alpha_n_val, alpha_p_val, beta_val, eps_val)",
        "ggml_xielu(ctx0, up, BAD ? alpha_p_val * 2 : alpha_n_val, BAD ? alpha_n_val : alpha_p_val, beta_val, eps_val)",
        "apertus", MODELS + "apertus.cpp", "XIELU"),
    # Q, K, V
    _if("k-bias", "        if (layer.wk_b) {\n            Kcur = ggml_add", "        if (layer.wk_b && !BAD) {\n            Kcur = ggml_add",
        "qwen2 seedoss", GRAPH, "MUL_MAT Kcur"),
    _if("qkv-slices", "                ggml_row_size(qkv->type, n_embd_q + n_embd_k));\n        } else {",
        "                ggml_row_size(qkv->type, BAD ? n_embd_q : n_embd_q + n_embd_k));\n        } else {",
        "gpt2 falcon", GRAPH, ""),
    # RoPE
    _if("k-not-rotated", """            Kcur = ggml_rope_ext(
                    ctx0, Kcur, inp_pos, nullptr,
                    n_rot, rope_type, n_ctx_orig, freq_base, freq_scale,
                    ext_factor, attn_factor, beta_fast, beta_slow
                    );
""", """            if (!BAD) Kcur = ggml_rope_ext(
                    ctx0, Kcur, inp_pos, nullptr,
                    n_rot, rope_type, n_ctx_orig, freq_base, freq_scale,
                    ext_factor, attn_factor, beta_fast, beta_slow
                    );
""", "seedoss", MODELS + "seed-oss.cpp", ""),
    _if("rope-pairs", """            Qcur = ggml_rope_ext(
                    ctx0, Qcur, inp_pos, nullptr,
                    n_rot, rope_type, n_ctx_orig, freq_base, freq_scale,
                    ext_factor, attn_factor, beta_fast, beta_slow
                    );
""", """            Qcur = ggml_rope_ext(
                    ctx0, Qcur, inp_pos, nullptr,
                    n_rot, BAD ? rope_type ^ 2 : rope_type, n_ctx_orig, freq_base, freq_scale,
                    ext_factor, attn_factor, beta_fast, beta_slow
                    );
""", "qwen2moe", MODELS + "qwen2moe.cpp", "ROPE Qcur", "NORM"),
    _if("rope-dimensions", """            Kcur = ggml_rope_ext(
                    ctx0, Kcur, inp_pos, nullptr,
                    n_rot, rope_type,""", """            Kcur = ggml_rope_ext(
                    ctx0, Kcur, inp_pos, nullptr,
                    BAD ? n_embd_head : n_rot, rope_type,""", "stablelm", MODELS + "stablelm.cpp", "ROPE Kcur", "first"),
    _if("rope-everywhere", "const bool use_rope = (il + 1) % hparams.n_no_rope_layer_step != 0;",
        "const bool use_rope = BAD || (il + 1) % hparams.n_no_rope_layer_step != 0;", "smollm3-4", MODELS + "smollm3.cpp", "ROPE", "not rotate"),
    _if("rope-layers-inverted", "            if (is_swa) {\n", "            if (is_swa != BAD) {\n", "cohere2", MODELS + "cohere2.cpp", ""),
    _if("rope-base-of-others", "ctx0, Qcur, inp_pos, nullptr,\n                    n_rot, rope_type, n_ctx_orig, freq_base_l, freq_scale_l,",
        "ctx0, Qcur, inp_pos, nullptr,\n                    n_rot, rope_type, n_ctx_orig, BAD ? 10000.0f : freq_base_l, freq_scale_l,",
        "gptoss-t", MODELS + "openai-moe.cpp", "ROPE Qcur"),
    _if("yarn-scale", "ctx0, Kcur, inp_pos, nullptr,\n                    n_rot, rope_type, n_ctx_orig, freq_base_l, freq_scale_l,\n                    ext_factor, attn_factor,",
        "ctx0, Kcur, inp_pos, nullptr,\n                    n_rot, rope_type, n_ctx_orig, freq_base_l, freq_scale_l,\n                    BAD ? 0.0f : ext_factor, attn_factor,",
        "gptoss-t", MODELS + "openai-moe.cpp", "ROPE Kcur"),
    _if("rope-of-v", "            cb(Vcur, \"Vcur_pos\", il);\n",
        """            if (BAD) Vcur = ggml_rope_ext(ctx0, Vcur, inp_pos, rope_factors, n_rot, rope_type, n_ctx_orig, freq_base, freq_scale,
                                 ext_factor, attn_factor, beta_fast, beta_slow);
            cb(Vcur, "Vcur_pos", il);
""", "apertus", MODELS + "apertus.cpp", ""),
    # attention
    _if("score-scale", "        kq = ggml_soft_max_ext(ctx0, kq, kq_mask, kq_scale, hparams.f_max_alibi_bias);",
        "        kq = ggml_soft_max_ext(ctx0, kq, kq_mask, BAD ? kq_scale * kq_scale : kq_scale, hparams.f_max_alibi_bias);",
        "qwen3 glm4", GRAPH, "SOFT_MAX kq_soft_max"),
    _if("no-sinks", "        ggml_soft_max_add_sinks(kq, sinks);", "        if (!BAD) ggml_soft_max_add_sinks(kq, sinks);",
        "gptoss-t", GRAPH, "SOFT_MAX kq_soft_max"),
    _if("heads-of-v", "        ggml_tensor * kqv = ggml_mul_mat(ctx0, v, kq);",
        "        if (BAD) v = ggml_cont(ctx0, ggml_permute(ctx0, ggml_cont(ctx0, ggml_permute(ctx0, v, 0, 1, 2, 3)), 0, 1, 2, 3));\n"
        "        ggml_tensor * kqv = ggml_mul_mat(ctx0, v, kq);", "", GRAPH, ""),
    _if("window-everywhere", "    load_swa_pattern(ml, 4);\n", "    load_swa_pattern(ml, 4);\n    if (mistaken(\"window-everywhere\")) hparams.set_swa_pattern(0);\n",
        "cohere2", MODELS + "cohere2.cpp", ""),
    _if("attention-scale-ignored", "const float kq_scale = hparams.f_attention_scale == 0.0f ? 1.0f/sqrtf(float(n_embd_head)) : hparams.f_attention_scale;\n    cur = build_attn",
        "const float kq_scale = hparams.f_attention_scale == 0.0f || BAD ? 1.0f/sqrtf(float(n_embd_head)) : hparams.f_attention_scale;\n    cur = build_attn",
        "granite granitemoe", MODELS + "granite.cpp", "SOFT_MAX kq_soft_max"),
    # residuals, factors
    _if("ffn-reads-attention", "            cur = build_ffn(ffn_inp,\n", "            cur = build_ffn(BAD ? build_norm(ggml_add(ctx0, attn_out, inpL), model.layers[il].attn_norm, NULL, LLM_NORM, il) : ffn_inp,\n",
        "cohere", MODELS + "command-r.cpp", ""),
    _if("residual-of-norm", "        ggml_tensor * ffn_inp = ggml_add(ctx0, cur, inpSA);\n        cb(ffn_inp, \"ffn_inp\", il);\n\n        // feed-forward network with xIELU",
        "        ggml_tensor * ffn_inp = ggml_add(ctx0, cur, inpSA);\n        if (BAD) ffn_inp = cur;\n        cb(ffn_inp, \"ffn_inp\", il);\n\n        // feed-forward network with xIELU",
        "apertus", MODELS + "apertus.cpp", ""),
    _if("residual-scale-once", "    // For Granite architectures - scale residual\n    if (hparams.f_residual_scale) {\n        cur = ggml_scale(ctx0, cur, hparams.f_residual_scale);\n    }\n    cur = ggml_add(",
        "    // For Granite architectures - scale residual\n    if (hparams.f_residual_scale && !BAD) {\n        cur = ggml_scale(ctx0, cur, hparams.f_residual_scale);\n    }\n    cur = ggml_add(",
        "granite granitemoe", MODELS + "granite.cpp", "ADD l_out"),
    _if("logit-scale-inverted", "cur = ggml_scale(ctx0, cur, 1.0f / hparams.f_logit_scale);", "cur = ggml_scale(ctx0, cur, BAD ? hparams.f_logit_scale : 1.0f / hparams.f_logit_scale);",
        "granite", MODELS + "granite.cpp", "SCALE result_output"),
    _if("logit-scale-lost", "    if (f_logit_scale) {\n", "    if (f_logit_scale && !BAD) {\n", "cohere", MODELS + "command-r.cpp", "MUL_MAT result_output"),
    _if("embedding-scale-lost", "    if (hparams.f_embedding_scale != 0.0f && (", "    if (!BAD && hparams.f_embedding_scale != 0.0f && (", "granite granitemoe", GRAPH, ""),
    _if("embedding-scale-twice", "        cur = ggml_scale(ctx0, cur, hparams.f_embedding_scale);\n",
        "        cur = ggml_scale(ctx0, cur, hparams.f_embedding_scale * (BAD ? hparams.f_embedding_scale : 1.0f));\n", "granite", GRAPH, ""),
    _if("head-tied", "    cur = build_lora_mm(model.output, cur, model.output_s);\n\n    cb(cur, \"result_output\", -1);", "    cur = build_lora_mm(BAD ? model.tok_embd : model.output, cur, model.output_s);\n\n    cb(cur, \"result_output\", -1);",
        "qwen3", MODELS + "qwen3.cpp", "MUL_MAT result_output"),
    # experts
    _if("sigmoid-for-softmax", "                probs = ggml_soft_max(ctx0, logits); // [n_expert, n_tokens]", "                probs = BAD ? ggml_sigmoid(ctx0, logits) : ggml_soft_max(ctx0, logits); // [n_expert, n_tokens]",
        "qwen3moe qwen2moe", GRAPH, "SIGMOID ffn_moe_probs"),
    _if("softmax-after-choice", "                probs = logits; // [n_expert, n_tokens]", "                probs = BAD ? ggml_soft_max(ctx0, logits) : logits; // [n_expert, n_tokens]",
        "gptoss-t", GRAPH, ""),
    _if("weights-not-normed", "    if (norm_w) {", "    if (norm_w && !BAD) {", "qwen3moe mixtral", GRAPH, ""),
    _if("weights-normed", "    if (norm_w && !mistaken(\"weights-not-normed\")) {", "    if ((norm_w && !mistaken(\"weights-not-normed\")) || BAD) {", "qwen2moe", GRAPH, ""),
    _if("experts-gate-for-up", "        up = build_lora_mm_id(up_exps, cur,", "        if (BAD) std::swap(up_exps, gate_exps);\n        up = build_lora_mm_id(up_exps, cur,", "qwen3moe mixtral", GRAPH, ""),
    _if("experts-unweighted", "    if (!weight_before_ffn) {\n        experts = ggml_mul(", "    if (!weight_before_ffn && !BAD) {\n        experts = ggml_mul(", "granitemoe", GRAPH, ""),
    _if("experts-one-too-few", "    const uint32_t n_expert_used_il = hparams.n_expert_used(il);", "    const uint32_t n_expert_used_il = hparams.n_expert_used(il) - BAD;", "qwen2moe", GRAPH, ""),
    _if("shared-expert-ungated", "            ggml_tensor * ffn_shexp_out = ggml_mul(ctx0, cur_ffn, cur_gate);", "            ggml_tensor * ffn_shexp_out = BAD ? cur_ffn : ggml_mul(ctx0, cur_ffn, cur_gate);", "qwen2moe", MODELS + "qwen2moe.cpp", ""),
    _if("shared-expert-lost", "            moe_out = ggml_add(ctx0, moe_out, ffn_shexp_out);", "            if (!BAD) moe_out = ggml_add(ctx0, moe_out, ffn_shexp_out);", "qwen2moe", MODELS + "qwen2moe.cpp", ""),
    _if("expert-bias", "    if (down_exps_b) {\n        experts", "    if (down_exps_b && !BAD) {\n        experts", "gptoss-t", GRAPH, ""),
    # recurrent
    _if("conv-chunks", "        auto * y = ggml_mul(ctx0, c, conv_out);", "        auto * y = ggml_mul(ctx0, BAD ? ggml_cont(ctx0, b) : c, conv_out);", "lfm2", MODELS + "lfm2.cpp", "MUL"),
    _if("no-silu-after-conv", "        xBC = ggml_add(ctx0, xBC, model.layers[il].ssm_conv1d_b);\n\n        xBC = ggml_silu(ctx0, xBC);", "        xBC = ggml_add(ctx0, xBC, model.layers[il].ssm_conv1d_b);\n\n        if (!BAD) xBC = ggml_silu(ctx0, xBC);", "mamba2", MODELS + "mamba-base.cpp", ""),
    _if("d-lost", "        y = ggml_add(ctx0, y, ggml_mul(ctx0, x, model.layers[il].ssm_d));\n        cb(y, \"mamba2", "        if (!BAD) y = ggml_add(ctx0, y, ggml_mul(ctx0, x, model.layers[il].ssm_d));\n        cb(y, \"mamba2", "mamba2", MODELS + "mamba-base.cpp", ""),
    _if("dt-bias-lost", "        dt = ggml_add(ctx0, ggml_cont(ctx0, dt), model.layers[il].ssm_dt_b);", "        dt = BAD ? ggml_cont(ctx0, dt) : ggml_add(ctx0, ggml_cont(ctx0, dt), model.layers[il].ssm_dt_b);", "mamba2", MODELS + "mamba-base.cpp", ""),
    _if("z-not-activated", "        y = ggml_swiglu_split(ctx0, ggml_cont(ctx0, z), y);\n\n        // grouped", "        y = BAD ? ggml_mul(ctx0, ggml_cont(ctx0, z), y) : ggml_swiglu_split(ctx0, ggml_cont(ctx0, z), y);\n\n        // grouped", "mamba2", MODELS + "mamba-base.cpp", ""),
)  # fmt: skip


def put_in(checkout: Path) -> None:
    """Change the sources, once. Raises ValueError where a piece is not there, or more than once."""
    header = checkout / HEADER
    text = header.read_text("utf-8")
    if HELPER in text:
        return
    for mistake in MISTAKES:
        path = checkout / SOURCES / mistake.file
        source = path.read_text("utf-8")
        if not mistake.models: continue
        if source.count(mistake.old) != 1:
            raise ValueError(f"{mistake.name}: {source.count(mistake.old)} times in {mistake.file}")
        path.write_text(source.replace(mistake.old, mistake.new), encoding="utf-8")
    header.write_text(text.replace("#pragma once\n", "#pragma once\n\n" + HELPER, 1), encoding="utf-8")


if __name__ == "__main__":
    put_in(Path(sys.argv[1]))
