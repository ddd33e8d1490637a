"""What checkpoints call their tensors where it is not what the model does, nor what a class of `transformers` says."""

from __future__ import annotations

# Architectures (a regular expression) whose checkpoints call their tensors otherwise than the model does: patterns in
# the model's names, and what they are on the hub.
_LFM2_VL = {
    r"^vision_tower\.": "model.vision_tower.",
    r"^multi_modal_projector\.": "model.multi_modal_projector.",
    r"^language_model\.model\.": "model.language_model.",
}
# None: SGLang does not look for it in a checkpoint. What several are called alike is one tensor, of all of them.
_OF_MISTRAL: dict[str, str | None] = {
    r"^model\.fc\.": "eagle_linear.",
    r"^model\.norm\.": "norm.",
    r"^model\.embed_tokens\.": "tok_embeddings.",
    r"^lm_head\.": "output.",
    r"^model\.layers\.(\d+)\.input_layernorm\.": r"layers.\1.attention_norm.",
    r"^model\.layers\.(\d+)\.post_attention_layernorm\.": r"layers.\1.ffn_norm.",
    r"^model\.layers\.(\d+)\.self_attn\.(q|k|v|o)_proj\.": r"layers.\1.attention.w\2.",
    r"^model\.layers\.(\d+)\.self_attn\.(q_a|q_b|kv_b)_proj\.": r"layers.\1.attention.w\2.",
    r"^model\.layers\.(\d+)\.self_attn\.kv_a_proj_with_mqa\.": r"layers.\1.attention.wkv_a_with_mqa.",
    r"^model\.layers\.(\d+)\.self_attn\.(q_a|kv_a)_layernorm\.": r"layers.\1.attention.\2_norm.",
    r"^model\.layers\.(\d+)\.mlp\.gate\.e_score_correction_bias$": r"layers.\1.router_biases",
    r"^model\.layers\.(\d+)\.mlp\.gate\.": r"layers.\1.gate.",
    r"^model\.layers\.(\d+)\.mlp\.(shared_experts\.|experts\.\d+\.)": r"layers.\1.\2",
    r"^model\.layers\.(\d+)\.mlp\.": r"layers.\1.feed_forward.",
    r"\.gate_proj\.(?=\w+$)": ".w1.",
    r"\.down_proj\.(?=\w+$)": ".w2.",
    r"\.up_proj\.(?=\w+$)": ".w3.",
}
CALLED: dict[str, dict[str, str | None]] = {
    "DSparkMiniMaxDraftModel": {r"^": "dspark."},
    "DeepseekV4ForCausalLMDSpark": {
        r"^stages\.": "mtp.",
        r"^markov_head\.": "mtp.0.markov_head.",
        r"^confidence_head\.": "mtp.0.confidence_head.",
        r"\.self_attn\.": ".attn.",
        r"\.mlp\.": ".ffn.",
        r"\.input_layernorm\.": ".attn_norm.",
        r"\.post_attention_layernorm\.": ".ffn_norm.",
        r"\.gate_proj\.": ".w1.",
        r"\.down_proj\.": ".w2.",
        r"\.up_proj\.": ".w3.",
        r"\.topk\.tid2eid$": ".gate.tid2eid",
        r"\.gate\.e_score_correction_bias$": ".gate.bias",
    },
    "DeepseekVL2ForCausalLM": {r"^language_model\.": "language."},
    "DotsOCRForCausalLM": {
        r"^model\.model\.": "model.",
        r"^model\.lm_head\.": "lm_head.",
        r"^visual\.": "vision_tower.",
        r"(?<=^vision_tower)(.*)\.qkv_proj": r"\1.qkv",
    },
    "Ernie4_5_MoeForCausalLMMTP": {
        r"^model\.mtp_(emb_norm|hidden_norm|linear_proj|block)\.": r"model.mtp_\1.0.",
    },
    "HYV4ForCausalLMNextN": {
        r"^model\.decoder\.": "model.mtp_layers.0.",
        r"^model\.shared_head\.norm\.": "model.mtp_layers.0.final_layernorm.",
        r"^model\.(?=enorm|hnorm|eh_proj)": "model.mtp_layers.0.",
    },
    "InklingForConditionalGenerationMTP": {
        r"^model\.(?!embed_tokens\.)": "model.mtp.layers.0.",
        r"^model\.embed_tokens\.": "model.llm.embed_tokens.",
    },
    # Its layers share banks of experts: as many here as layers, so that each has its own.
    "InternS2MobiusForConditionalGeneration": {
        r"\.layers\.(\d+)\.mlp\.(?=experts\.|gate\.)": r".meta_mlp.\1.",
    },
    "Lfm2VlForConditionalGeneration": _LFM2_VL,
    "LightOnOCRForConditionalGeneration": {
        r"^vision_projection_norm\.": "model.vision_projection.norm.",
        r"^patch_merger\.": "model.vision_projection.patch_merger.",
        r"^vision_language_adapter\.w_in\.": "model.vision_projection.linear_1.",
        r"^vision_language_adapter\.w_out\.": "model.vision_projection.linear_2.",
        r"^language_model\.model\.": "model.language_model.",
    },
    "LlamaEmbeddingModel": {r"^model\.": ""},
    "NemotronH_(Nano_)?(Omni_Reasoning_V3|VL_V2)": {
        r"^vision_model\.": "vision_model.radio_model.",
        r"(?<=^vision_model)(.*)\.encoder\.layers": r"\1.blocks",
        r"(?<=^vision_model)(.*)\.attn\.attn": r"\1.attn",
        r"(?<=^vision_model)(.*)\.qkv_proj": r"\1.qkv",
    },
    "Phi4MMForCausalLM": {
        r"^language_model\.model\.": "model.",
        r"^vision_encoder\.": "model.embed_tokens_extend.image_embed.",
        r"(?<=image_embed)(.*)\.self_attn\.proj\.": r"\1.self_attn.out_proj.",
        r"^embed_tokens_extend\.audio_projection_for_vision\.": (
            "model.embed_tokens_extend.audio_embed.audio_projection.vision."
        ),
        r"^embed_tokens_extend\.audio_projection\.": (
            "model.embed_tokens_extend.audio_embed.audio_projection.speech."
        ),
        r"^embed_tokens_extend\.": "model.embed_tokens_extend.audio_embed.",
    },
    "Qwen3NextForCausalLMMTP": {r"^model\.": "mtp.", r"^(?=fc\.|pre_fc)": "mtp."},
    "StepVLForConditionalGeneration": {r"^language_model\.": ""},
    "Step3p5(ForCausalLM|MTP)": {r"\.moe\.experts\.\d+\.": ".moe."},
    "LlavaForConditionalGeneration": {
        r"(?<=^vision_tower)(.*)\.attention\.proj\.": r"\1.attention.o_proj."
    },
    "(Llava(Llama|Mistral|Qwen|Vid)|YiVL)ForCausalLM": {
        r"^language_model\.model\.image_newline$": "model.image_newline",
        r"^language_model\.": "",
        r"^multi_modal_projector\.linear_1\.": "model.mm_projector.0.",
        r"^multi_modal_projector\.ln_1\.": "model.mm_projector.1.",
        r"^multi_modal_projector\.ln_2\.": "model.mm_projector.4.",
    },
    "Llava(Llama|Mistral|Qwen|Vid)ForCausalLM": {
        r"^multi_modal_projector\.linear_2\.": "model.mm_projector.2.",
    },
    "YiVLForCausalLM": {r"^multi_modal_projector\.linear_2\.": "model.mm_projector.3."},
    "MistralLarge3ForCausalLM(Eagle)?": _OF_MISTRAL,
    "PixtralForConditionalGeneration": {r"^language_model\.": "", **_OF_MISTRAL},
    "DotsVLMForCausalLM": {
        r"^language_model\.": "",
        r"(?<=^vision_tower)(.*)\.qkv_proj": r"\1.qkv",
    },
    "(Unlimited|Deepseek)OCRForCausalLM": {
        r".*\.position_ids": None,
        r"^model\.lm_head\.": "lm_head.",
        r"^model\.model\.": "model.",
        r"^(?=sam_model|vision_model|projector|image_newline|view_seperator)": "model.",
    },
    "BailingMM2?NativeForConditionalGeneration": {
        r"^vision\.": "model.visual.",
        r"(?<=^model\.visual)(.*)\.qkv_proj": r"\1.qkv",
        r"^linear_proj\.": "model.linear_proj.",
        r"^model\.model\.": "model.",
        r"^model\.lm_head\.": "lm_head.",
    },
    "BailingMoeV3VLForConditionalGeneration": {
        r"^visual\.": "model.visual.",
        r"(?<=^model\.visual)(.*)\.qkv_proj": r"\1.qkv",
        r"^model\.model\.": "model.",
        r"^model\.lm_head\.": "lm_head.",
    },
}

# Architectures (a regular expression) to modules, by name, whose parameters a checkpoint has as the model does, fused.
FUSED: dict[str, str] = {
    "Bailing(MM2?Native|MoeV3VL)ForConditionalGeneration": r"^(vision|visual)\.",
    "DeepseekVL2ForCausalLM": r"^vision\.",
    "DotsVLMForCausalLM": r"^vision_tower\.",
    "InklingForConditionalGeneration": r"^llm\.layers\.\d+\.mlp\.experts\.",
    "Phi4MMForCausalLM": r"^language_model\.",
    "StepVLForConditionalGeneration": r"^vision_model\.",
}

# Architectures (a regular expression) to parameters that SGLang's own loader leaves as they were drawn.
LEFT: dict[str, str] = {"MultiModalityCausalLM": "gen_"}  # what draws pictures
