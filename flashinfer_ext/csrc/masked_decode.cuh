// Decode attention that ignores a row's entries past its length on the device.
//
// The plan is made once, for rows of one width, so FlashInfer believes that every row is full.
struct MaskedDecode : AttentionVariantBase {
  static constexpr bool use_softmax = true;
  uint32_t window_left, qo_len, kv_len;
  float sm_scale_log2;
  uint32_t row_length;

  template <typename Params>
  __device__ __host__ MaskedDecode(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;
    sm_scale_log2 = float(params.sm_scale) * math::log2e;
    row_length = uint32_t(params.row_lengths[batch_idx]);
  }

  // Called for every entry on every path, unlike the mask hook.
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return kv_idx < row_length ? logits : -math::inf;
  });
};
