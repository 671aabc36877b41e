// Decode attention on tensor cores that also writes its logits, in base 2.
//
// Entries past a row's length are computed from whatever lies in shared memory: they must not be
// written. On the CUDA-core path they cannot be told apart, so this variant is for tensor cores.
struct LogitsDecode : AttentionVariantBase {
  static constexpr bool use_softmax = true;
  uint32_t window_left, qo_len, kv_len;
  float sm_scale_log2;
  int64_t first_row;

  template <typename Params>
  __device__ __host__ LogitsDecode(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;
    sm_scale_log2 = float(params.sm_scale) * math::log2e;
    first_row = params.q_indptr[batch_idx];
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    if (qo_idx < qo_len && kv_idx < kv_len) {
      const int64_t row = (first_row + qo_idx) * params.num_qo_heads + qo_head_idx;
      params.logits[row * params.width + kv_idx] = logits * sm_scale_log2;
    }
    return logits;
  });
};
