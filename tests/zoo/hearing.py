"""transformers' models of sounds and time series, tiny."""

from __future__ import annotations

from typing import Any

import torch

from tests.zoo.subject import Subject, numbers, of_transformers, steady, tokens

_LAYERS: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
}  # fmt: skip
_SPECIAL: dict[str, Any] = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
_WAVES: dict[str, Any] = {
    **_LAYERS, "conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "vocab_size": 24, "layerdrop": 0.0,
    "mask_time_prob": 0.0, "feat_extract_norm": "group", "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "activation_dropout": 0.0, "feat_proj_dropout": 0.0, **_SPECIAL,
}  # fmt: skip
_BOTH: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "use_cache": False, "decoder_start_token_id": 3, "dropout": 0.0,
    **_SPECIAL,
}  # fmt: skip
_TEXT: dict[str, Any] = {**_LAYERS, "vocab_size": 88, "max_position_embeddings": 64, "use_cache": False, **_SPECIAL}
_SERIES: dict[str, Any] = {
    "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "use_cache": False, "dropout": 0.0,
}  # fmt: skip

_wave = steady({"input_values": numbers(3, 400)})
_features = steady({"input_features": numbers(3, 32, 20)})


def _waves(kind: str, maker: str, **settings: Any) -> Subject:
    return of_transformers(kind, maker, _wave, **{**_WAVES, **settings})


_past: dict[str, Any] = {
    "past_values": numbers(3, 20).abs(), "past_time_features": numbers(3, 20, 2),
    "past_observed_mask": torch.ones(3, 20), "static_categorical_features": torch.zeros(3, 1, dtype=torch.long),
    "static_real_features": numbers(3, 1), "future_values": numbers(3, 8).abs(),
    "future_time_features": numbers(3, 8, 2),
}  # fmt: skip


def _forecast(kind: str, maker: str, **settings: Any) -> Subject:
    return of_transformers(
        kind, maker, steady(_past), **_SERIES, prediction_length=8, context_length=13, lags_sequence=[1, 2, 7],
        num_time_features=2, num_static_categorical_features=1, num_static_real_features=1, cardinality=[4],
        embedding_dimension=[2], **settings,
    )  # fmt: skip


HEARING: dict[str, Subject] = {
    "time_series_transformer": _forecast("time_series_transformer", "TimeSeriesTransformerForPrediction"),
    "informer": _forecast("informer", "InformerForPrediction", sampling_factor=1),
    "wav2vec2": _waves("wav2vec2", "Wav2Vec2ForCTC"),
    "wav2vec2_stable": _waves(
        "wav2vec2", "Wav2Vec2ForCTC", feat_extract_norm="layer", do_stable_layer_norm=True, conv_bias=True
    ),
    "wav2vec2_masked": of_transformers(
        "wav2vec2", "Wav2Vec2Model",
        steady({"input_values": numbers(3, 400), "attention_mask": torch.ones(3, 400, dtype=torch.long)}),
        **{**_WAVES, "feat_extract_norm": "layer"},
    ),
    "hubert": _waves("hubert", "HubertModel"),
    "wavlm": _waves("wavlm", "WavLMModel"),
    "unispeech": _waves("unispeech", "UniSpeechModel"),
    "unispeech_sat": _waves("unispeech-sat", "UniSpeechSatModel"),
    "data2vec_audio": _waves("data2vec-audio", "Data2VecAudioModel", conv_pos_kernel_size=3),
    "sew": _waves("sew", "SEWModel", squeeze_factor=2),
    "sew_d": _waves("sew-d", "SEWDModel", squeeze_factor=2, max_position_embeddings=64, position_buckets=8),
    "wav2vec2_conformer": _waves("wav2vec2-conformer", "Wav2Vec2ConformerModel", position_embeddings_type="rotary"),
    "wav2vec2_conformer_relative": _waves(
        "wav2vec2-conformer", "Wav2Vec2ConformerModel", position_embeddings_type="relative"
    ),
    "wav2vec2_bert": of_transformers(
        "wav2vec2-bert", "Wav2Vec2BertModel", _features, **_LAYERS, feature_projection_input_dim=20, layerdrop=0.0,
        left_max_position_embeddings=8, right_max_position_embeddings=4,
    ),
    "audio_spectrogram_transformer": of_transformers(
        "audio-spectrogram-transformer", "ASTModel", steady({"input_values": numbers(3, 24, 16)}), **_LAYERS,
        patch_size=4, max_length=24, num_mel_bins=16, frequency_stride=4, time_stride=4,
    ),
    "speech_to_text": of_transformers(
        "speech_to_text", "Speech2TextForConditionalGeneration",
        steady({"input_features": numbers(3, 32, 20), "decoder_input_ids": tokens(88, 3, 12)}), **_BOTH,
        vocab_size=88, input_feat_per_channel=20, conv_channels=32, max_source_positions=64, max_target_positions=32,
    ),
    "moonshine": of_transformers(
        "moonshine", "MoonshineForConditionalGeneration",
        steady({"input_values": numbers(3, 4000), "decoder_input_ids": tokens(88, 3, 12)}), hidden_size=32,
        intermediate_size=64, encoder_num_hidden_layers=2, decoder_num_hidden_layers=2, encoder_num_attention_heads=4,
        decoder_num_attention_heads=4, vocab_size=88, use_cache=False, decoder_start_token_id=3, **_SPECIAL,
    ),
    "speecht5": of_transformers(
        "speecht5", "SpeechT5ForSpeechToText",
        steady({"input_values": numbers(3, 400), "decoder_input_ids": tokens(88, 3, 12)}),
        **{**_WAVES, "vocab_size": 88}, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, use_cache=False, decoder_start_token_id=3,
        encoder_layerdrop=0.0, decoder_layerdrop=0.0, positional_dropout=0.0,
    ),
    "speecht5_tts": of_transformers(
        "speecht5", "SpeechT5ForTextToSpeech",
        steady({"input_ids": tokens(88, 3, 12), "decoder_input_values": numbers(3, 8, 20),
                "speaker_embeddings": numbers(3, 8)}),
        **{**_WAVES, "vocab_size": 88}, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, use_cache=False, decoder_start_token_id=3,
        encoder_layerdrop=0.0, decoder_layerdrop=0.0, num_mel_bins=20, speech_decoder_prenet_units=16,
        speaker_embedding_dim=8, speech_decoder_postnet_units=16, speech_decoder_prenet_dropout=0.0,
    ),
    "musicgen_decoder": of_transformers(
        "musicgen_decoder", "MusicgenForCausalLM", steady({"input_ids": tokens(88, 12, 8)}), vocab_size=88,
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64, num_codebooks=4, use_cache=False,
        max_position_embeddings=64, dropout=0.0, **_SPECIAL,
    ),
    "clap": of_transformers(
        "clap", "ClapModel",
        steady({"input_ids": tokens(88, 3, 12), "attention_mask": torch.ones(3, 12, dtype=torch.long),
                "input_features": numbers(3, 1, 64, 16)}),
        projection_dim=16, text_config={**_TEXT, "projection_dim": 16},
        audio_config={"window_size": 4, "num_mel_bins": 16, "spec_size": 32, "patch_size": 2, "patch_stride": [2, 2],
                      "hidden_size": 32, "patch_embeds_hidden_size": 16, "depths": [2, 2],
                      "num_attention_heads": [4, 4], "num_hidden_layers": 2, "projection_dim": 16,
                      "enable_fusion": False, "mlp_ratio": 2.0},
    ),
    "clvp": of_transformers(
        "clvp_encoder", "ClvpEncoder", steady({"input_ids": tokens(88, 3, 12)}), vocab_size=88, hidden_size=32,
        intermediate_size=64, projection_dim=16, num_hidden_layers=2, num_attention_heads=4, use_rotary_embedding=False,
    ),
    "seamless_m4t": of_transformers(
        "seamless_m4t", "SeamlessM4TForTextToText",
        steady({"input_ids": tokens(88, 3, 12), "decoder_input_ids": tokens(88, 3, 8)}), vocab_size=88, hidden_size=32,
        encoder_layers=2, decoder_layers=2, encoder_ffn_dim=64, decoder_ffn_dim=64, encoder_attention_heads=4,
        decoder_attention_heads=4, use_cache=False, t2u_vocab_size=40, dropout=0.0, speech_encoder_layers=1,
        t2u_encoder_layers=1, t2u_decoder_layers=1, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
        max_position_embeddings=64, **_SPECIAL,
    ),
    "encodec": of_transformers(
        "encodec", "EncodecModel", steady({"input_values": numbers(2, 1, 320)}), num_filters=4, hidden_size=16,
        codebook_size=32, codebook_dim=16, upsampling_ratios=[4, 2], num_lstm_layers=1, compress=2,
        target_bandwidths=[24.0], sampling_rate=4000, normalize=False, chunk_length_s=None, overlap=None,
    ),
    "mimi": of_transformers(
        "mimi", "MimiModel", steady({"input_values": numbers(2, 1, 640)}), **_LAYERS, num_filters=4,
        num_key_value_heads=4, head_dim=8, codebook_size=32, codebook_dim=16, vector_quantization_hidden_dimension=16,
        num_quantizers=4, num_semantic_quantizers=1, upsampling_ratios=[4, 2], frame_rate=250, sampling_rate=4000,
        sliding_window=16, max_position_embeddings=64, compress=2, use_cache=False, upsample_groups=32,
    ),
    "dac": of_transformers(
        "dac", "DacModel", steady({"input_values": numbers(2, 1, 320)}), encoder_hidden_size=8,
        downsampling_ratios=[2, 4], decoder_hidden_size=32, n_codebooks=2, codebook_size=16, codebook_dim=4,
        sampling_rate=4000, hop_length=8,
    ),
    "univnet": of_transformers(
        "univnet", "UnivNetModel", steady({"input_features": numbers(2, 7, 20), "noise_sequence": numbers(2, 7, 16)}),
        model_in_channels=16, model_hidden_channels=8, num_mel_bins=20, resblock_stride_sizes=[8, 8, 4],
        kernel_predictor_hidden_channels=16,
    ),
    "patchtst": of_transformers(
        "patchtst", "PatchTSTForPrediction", steady({"past_values": numbers(3, 32, 3)}), d_model=32,
        num_hidden_layers=2, num_attention_heads=4, ffn_dim=64, context_length=32, patch_length=4, patch_stride=4,
        num_input_channels=3, prediction_length=8, dropout=0.0, use_cls_token=False,
    ),
    "patchtsmixer": of_transformers(
        "patchtsmixer", "PatchTSMixerForPrediction", steady({"past_values": numbers(3, 32, 3)}), d_model=16,
        num_layers=2, expansion_factor=2, context_length=32, patch_length=4, patch_stride=4, num_input_channels=3,
        prediction_length=8, dropout=0.0, head_dropout=0.0,
    ),
    "decision_transformer": of_transformers(
        "decision_transformer", "DecisionTransformerModel",
        steady({"states": numbers(3, 6, 5), "actions": numbers(3, 6, 4), "rewards": numbers(3, 6, 1),
                "returns_to_go": numbers(3, 6, 1), "timesteps": torch.arange(6).expand(3, 6),
                "attention_mask": torch.ones(3, 6, dtype=torch.long)}),
        state_dim=5, act_dim=4, hidden_size=32, n_layer=2, n_head=4, n_positions=64, max_ep_len=40,
    ),
}  # fmt: skip
